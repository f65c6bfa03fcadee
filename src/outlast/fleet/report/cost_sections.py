"""Report sections about the cost of failures: ETTR, goodput, crash loops, counterfactuals."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import polars as pl

from outlast.fleet.analysis import goodput_loss, measured_ettr
from outlast.fleet.report import report_figures
from outlast.fleet.report.report_sections import (
    DrawnSection,
    ReportColumn,
    ReportFacts,
    make_section,
)

GPU_HOUR = 3600.0


class TrainingRuns(NamedTuple):
    """ETTR by size (`ettr_by_size`) of job runs of the highest QOS, if there is any."""

    qos: str | None
    sizes: pl.DataFrame


def training_runs(facts: ReportFacts) -> TrainingRuns:
    """Return the ETTR of job runs on GPUs."""
    top = measured_ettr.top_qos(facts.tables)
    found = measured_ettr.measured_ettr(
        facts.tables, facts.infra, qos=None if top is None else [top]
    )
    return TrainingRuns(
        top, measured_ettr.ettr_by_size(found.filter(pl.col("gpus") > 0), facts.node_rate_per_s)
    )


def ettr_section(of: TrainingRuns) -> DrawnSection:
    """Return the section of ETTR by size (figure 9 of the paper)."""
    top, found = of
    columns = [
        ReportColumn("bucket", "GPUs, up to", "count"),
        ReportColumn("runs", "job runs", "count"),
        ReportColumn("ettr", "ETTR", "share"),
        ReportColumn("low", "90 % from", "share"),
        ReportColumn("high", "to", "share"),
        ReportColumn("equation_1", "equation 1", "share"),
        ReportColumn("expected", "equations 4 to 6", "share"),
        ReportColumn("exact", "exact", "share"),
        ReportColumn("hidden", "attempts missing", "share"),
    ]
    description = (
        "The share of a job run's time, waits included, that was training, for runs of a day and"
        " more" + (f" in the highest QOS ({top})" if top else "") + ". A checkpoint every"
        f" {measured_ettr.INTERVAL_S / 60:g} minutes and {measured_ettr.INIT_S / 60:g} for a"
        " start are assumed, since"
        " accounting has neither; every end but the last counts as an interruption. The columns"
        " beside it are expected by the failure rate."
    )
    notes = [] if len(found) else ["no job run held GPUs for a day"]
    measured = make_section(
        "ettr", "Effective training time ratio", description, columns, found, notes
    )
    return DrawnSection(measured, partial(report_figures.draw_ettr, found) if len(found) else None)


def counterfactual_section(
    facts: ReportFacts, of: TrainingRuns, ranking: pl.DataFrame
) -> DrawnSection:
    """Return the section of ETTR under other settings and without lemons."""
    remaining = measured_ettr.rate_share_without_lemons(ranking) if ranking["lemon"].any() else None
    found = measured_ettr.counterfactual_ettr(
        of.sizes, facts.node_rate_per_s, without_lemons=remaining
    )
    wide = (
        found.pivot("change", index="bucket", values="ettr", maintain_order=True)
        if len(found)
        else pl.DataFrame({"bucket": []}, schema={"bucket": pl.Int64})
    )
    columns = [ReportColumn("bucket", "GPUs, up to", "count")]
    columns += [ReportColumn(name, name, "share") for name in wide.columns[1:]]
    description = (
        "ETTR in the long run, exactly, with one of its causes halved and all else as it is."
    )
    if remaining is not None:
        description += (
            f" Without the lemons, nodes fail {remaining:.3g} times as often, all jobs taken"
            " together: large ones are taken to lie on lemons as often as others do."
        )
    return DrawnSection(make_section("whatif", "Improved ETTR", description, columns, wide))


def goodput_section(facts: ReportFacts) -> DrawnSection:
    """Return the section of lost goodput (figure 8 of the paper)."""
    each = goodput_loss.lost_goodput(facts.tables, facts.infra, preempted=facts.preempted)
    summed = goodput_loss.total_loss(facts.tables, each)
    found = goodput_loss.loss_by_size(each).with_columns(
        pl.col("first_gpu_s", "second_gpu_s") / GPU_HOUR
    )
    columns = [
        ReportColumn("bucket", "GPUs, up to", "count"),
        ReportColumn("first_attempts", "failed attempts", "count"),
        ReportColumn("first_gpu_s", "GPU hours lost by them", "GPU hours"),
        ReportColumn("second_attempts", "preempted for them", "count"),
        ReportColumn("second_gpu_s", "GPU hours lost by these", "GPU hours"),
        ReportColumn("share", "share", "share"),
    ]
    description = (
        "Work lost to failures: half a checkpoint interval"
        f" ({goodput_loss.INTERVAL_S / 120:g} minutes), or the attempt if it was shorter, times its"
        " GPUs. First order: attempts that infrastructure ended. Second order: jobs that were"
        " preempted when one of these restarted."
    )
    notes = []
    if summed.second_share is not None:
        lost = summed.first_gpu_s + summed.second_gpu_s
        notes = [
            f"{lost / GPU_HOUR:,.0f} GPU hours of {summed.held_gpu_s / GPU_HOUR:,.0f},"
            f" {100 * summed.second_share:.3g} % of them second order"
        ]
    section = make_section("goodput", "Cost of failures", description, columns, found, notes)
    return DrawnSection(
        section, partial(report_figures.draw_goodput, found) if found["share"].sum() else None
    )


def crash_loops_section(facts: ReportFacts) -> DrawnSection:
    """Return the section of crash loops."""
    found = goodput_loss.find_crash_loops(
        facts.tables, facts.infra, preempted=facts.preempted
    ).with_columns(
        pl.col("lost_gpu_s", "preempted_gpu_s") / GPU_HOUR,
        day=pl.from_epoch("since_ns", time_unit="ns").dt.date(),
    )
    found = found.filter(pl.col("infra") > 0)
    columns = [
        ReportColumn("job", "job"),
        ReportColumn("user", "user"),
        ReportColumn("gpus", "GPUs", "count"),
        ReportColumn("day", "from", "day"),
        ReportColumn("failures", "failures", "count"),
        ReportColumn("infra", "by infrastructure", "count"),
        ReportColumn("lost_gpu_s", "GPU hours lost", "GPU hours"),
        ReportColumn("preempted", "preempted others", "count"),
        ReportColumn("preempted_gpu_s", "GPU hours lost by these", "GPU hours"),
    ]
    description = (
        f"Jobs that failed and restarted at least {goodput_loss.TIMES} times within"
        f" {goodput_loss.WINDOW_S / 3600:g} hours, infrastructure being the cause at least once."
    )
    return DrawnSection(make_section("loops", "Crash loops", description, columns, found))
