"""Report sections about costs (ETTR, goodput, crash loops, counterfactuals) and about lemons."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import polars as pl

from outlast.fleet.analysis import goodput_loss, lemons, measured_ettr
from outlast.fleet.analysis.lemon_evidence import lemon_evidence, suspected_parts
from outlast.fleet.analysis.lemons import SIGNALS
from outlast.fleet.record_tables import DAY_NS
from outlast.fleet.report import report_figures
from outlast.fleet.report.report_sections import (
    DrawnSection,
    ReportColumn,
    ReportFacts,
    make_section,
)
from outlast.text_formatting import plural

GPU_HOUR = 3600.0


class TrainingRuns(NamedTuple):
    """ETTR by size (`ettr_by_size`) of job runs of the highest QOS, if there is any."""

    qos: str | None
    sizes: pl.DataFrame


def training_runs(facts: ReportFacts) -> TrainingRuns:
    """Return the ETTR of job runs on GPUs."""
    top = measured_ettr.top_qos(facts.tables)
    table = measured_ettr.measured_ettr(
        facts.tables, facts.infra, qos=None if top is None else [top]
    )
    return TrainingRuns(
        top, measured_ettr.ettr_by_size(table.filter(pl.col("gpus") > 0), facts.node_rate_per_s)
    )


def ettr_section(of: TrainingRuns) -> DrawnSection:
    """Return the section of ETTR by size (figure 9 of the paper)."""
    top, table = of
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
    notes = [] if len(table) else ["no job run held GPUs for a day"]
    measured = make_section(
        "ettr", "Effective training time ratio", description, columns, table, notes
    )
    return DrawnSection(measured, partial(report_figures.draw_ettr, table) if len(table) else None)


def counterfactual_section(facts: ReportFacts, of: TrainingRuns) -> DrawnSection:
    """Return the section of ETTR under other settings and without lemons."""
    ranking = facts.ranking
    remaining = measured_ettr.rate_share_without_lemons(ranking) if ranking["lemon"].any() else None
    table = measured_ettr.counterfactual_ettr(
        of.sizes, facts.node_rate_per_s, without_lemons=remaining
    )
    wide = (
        table.pivot("change", index="bucket", values="ettr", maintain_order=True)
        if len(table)
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
    table = goodput_loss.loss_by_size(each).with_columns(
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
    section = make_section("goodput", "Cost of failures", description, columns, table, notes)
    return DrawnSection(
        section, partial(report_figures.draw_goodput, table) if table["share"].sum() else None
    )


def crash_loops_section(facts: ReportFacts) -> DrawnSection:
    """Return the section of crash loops."""
    table = goodput_loss.find_crash_loops(
        facts.tables, facts.infra, preempted=facts.preempted
    ).with_columns(
        pl.col("lost_gpu_s", "preempted_gpu_s") / GPU_HOUR,
        day=pl.from_epoch("since_ns", time_unit="ns").dt.date(),
    )
    table = table.filter(pl.col("infra") > 0)
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
    return DrawnSection(make_section("loops", "Crash loops", description, columns, table))


SUSPECTS = 50  # and all lemons


def lemon_sections(facts: ReportFacts) -> Iterator[DrawnSection]:
    """Yield the sections of lemons (IV.A of the paper, Table II and figure 11)."""
    ranking = facts.ranking
    bad = pl.col("lemon") | pl.col("earlier")
    suspects = ranking.filter(bad | (pl.col("failures") > 0))
    suspects = suspects.filter(pl.col("lemon") | (pl.int_range(pl.len()) < SUSPECTS))
    why = lemon_evidence(facts.tables, facts.found, suspects)
    table = suspects.join(why, on=["cluster", "node"], how="left", maintain_order="left")
    yield _rank_section(facts, table)
    yield _parts_section(table.filter(bad))
    yield _signals_section(ranking)


def _rank_section(facts: ReportFacts, table: pl.DataFrame) -> DrawnSection:
    ranking = facts.ranking
    called = pl.when("lemon").then(pl.lit("lemon")).when("earlier").then(pl.lit("earlier"))
    table = table.with_columns(called=called.otherwise(pl.lit("")))
    columns = [
        ReportColumn("node", "node"),
        ReportColumn("called", ""),
        ReportColumn("failures", "failures", "times"),
        ReportColumn("expected", "expected", "times"),
        ReportColumn("times", "times", "times"),
        ReportColumn("p", "by chance", "p"),
        ReportColumn("node_days", "node-days", "times"),
        ReportColumn("past_failures", "in all of the window", "times"),
        ReportColumn("part", "part"),
        ReportColumn("why", "why"),
        ReportColumn("xid_cnt", "XIDs", "count"),
        ReportColumn("tickets", "tickets", "count"),
        ReportColumn("out_count", "outages", "count"),
        ReportColumn("excl_jobid_count", "excluded by jobs", "count"),
    ]
    ran = "that ran jobs"
    how = "their failures are"
    up = "they ran"
    if facts.by == "outages":
        ran = "of the cluster"
        how = "their outages are"
        up = "they were up"
    days = (facts.tables.until_ns - facts.tables.since_ns) / DAY_NS
    description = (
        f"Nodes {ran} in the last {min(days, lemons.DAYS):.3g} days, by how unlikely {how} by"
        f" chance, given how long {up} and the rate of their kind, in these days or in all"
        f" {days:.3g} of the window. A lemon is one that this does not explain, with"
        f" {100 * lemons.FDR:g} % of false alarms; `earlier` are lemons that did not fail in these"
        " days."
    )
    lemon_count = int(ranking["lemon"].sum())
    earlier = int(ranking["earlier"].sum())
    notes = [f"{plural(lemon_count, 'lemon')} among {plural(len(ranking), 'node')} {ran}"]
    if earlier:
        notes.append(f"{plural(earlier, 'node')} failed as often before these days only")
    section = make_section("lemons", "Bad nodes", description, columns, table, notes)
    return DrawnSection(
        section, partial(report_figures.draw_lemons, ranking) if len(table) else None
    )


def _parts_section(bad: pl.DataFrame) -> DrawnSection:
    """Return the section of suspected parts (Table II)."""
    table = suspected_parts(bad)
    columns = [
        ReportColumn("part", "part"),
        ReportColumn("lemons", "bad nodes", "count"),
        ReportColumn("share", "share", "share"),
        ReportColumn("exchanged", "exchanged in", "count"),
        ReportColumn("paper", "RSC-1 and RSC-2", "share"),
    ]
    description = (
        "The likely faulty part of each bad node: the replaced part, else that of a ticket, else"
        " that suggested by its most frequent symptom. The last column is Table II of the paper."
    )
    section = make_section("parts", "Faulty parts of bad nodes", description, columns, table)
    return DrawnSection(section, partial(report_figures.draw_parts, table) if len(table) else None)


def _signals_section(ranking: pl.DataFrame) -> DrawnSection:
    """Return the section of the lemon signals (figure 11)."""
    rows = []
    steps = []
    for name in SIGNALS:
        values = ranking.select(pl.col(name).cast(pl.Float64).fill_null(0.0), "lemon")
        most = float(values[name].max() or 0.0)  # type: ignore[arg-type]
        bad = values.filter("lemon")[name]
        rows.append(
            (
                name,
                int((values[name] > 0).sum()),
                values[name].quantile(0.9, "linear"),
                most,
                int((bad > 0).sum()),
                bad.median(),
            )
        )
        if most > 0:
            steps.append(
                values.group_by(value=name)
                .agg(nodes=pl.len(), lemons=pl.col("lemon").sum().cast(pl.Int64))
                .sort("value")
                .select(
                    pl.lit(name).alias("signal"),
                    "value",
                    "lemons",
                    of_largest=pl.col("value") / most,
                    nodes_share=pl.col("nodes").cum_sum() / len(values),
                )
            )
    columns = [
        ReportColumn("signal", "signal"),
        ReportColumn("nodes", "nodes that have it", "count"),
        ReportColumn("upper", "9 of 10 nodes up to", "times"),
        ReportColumn("most", "largest", "times"),
        ReportColumn("lemons", "lemons that have it", "count"),
        ReportColumn("lemons_median", "median of lemons", "times"),
    ]
    schema = dict(
        zip(
            (column.key for column in columns),
            (pl.String, pl.Int64, pl.Float64, pl.Float64, pl.Int64, pl.Float64),
            strict=True,
        )
    )
    description = (
        "The paper's seven signals of a lemon, over all nodes, in the same days as the ranking: a"
        " useful signal is one of most lemons and few other nodes."
    )
    drawn = pl.concat(steps) if steps else None
    table = pl.DataFrame(rows, schema=schema, orient="row")
    section = make_section(
        "signals", "Signals of lemons", description, columns, table, series=drawn
    )
    return DrawnSection(
        section, None if drawn is None else partial(report_figures.draw_signals, drawn)
    )
