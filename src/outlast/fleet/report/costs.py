"""The sections about what failures cost: ETTR, goodput, crash loops, and what less would give."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import polars as pl

from outlast.fleet import ettr, goodput, loops, whatif
from outlast.fleet.report import pictures
from outlast.fleet.report.sections import Column, Facts, Told, section

GPU_HOUR = 3600.0


class Runs(NamedTuple):
    """Job runs of the highest QOS, if there is any: `ettr.by_size`."""

    qos: str | None
    sizes: pl.DataFrame


def runs(facts: Facts) -> Runs:
    """Those that held GPUs."""
    top = ettr.top_qos(facts.tables)
    found = ettr.ettr(facts.tables, facts.infra, qos=None if top is None else [top])
    return Runs(top, ettr.by_size(found.filter(pl.col("gpus") > 0), facts.node_rate_per_s))


def training(of: Runs) -> Told:
    """Figure 9 of the paper."""
    top, found = of
    columns = [
        Column("bucket", "GPUs, up to", "count"), Column("runs", "job runs", "count"),
        Column("ettr", "ETTR", "share"), Column("low", "90 % from", "share"),
        Column("high", "to", "share"), Column("equation_1", "equation 1", "share"),
        Column("expected", "equations 4 to 6", "share"),
        Column("exact", "exact", "share"), Column("hidden", "attempts missing", "share"),
    ]  # fmt: skip
    said = (
        "The share of a job run's time, waits included, that was training, for runs of a day and"
        " more" + (f" in the highest QOS ({top})" if top else "") + ". A checkpoint every"
        f" {ettr.INTERVAL_S / 60:g} minutes and {ettr.INIT_S / 60:g} for a start are assumed, since"
        " accounting knows neither; every end but the last counts as an interruption. Beside it,"
        " what the failure rate lets expect."
    )
    notes = [] if len(found) else ["no job run held GPUs for a day"]
    measured = section("ettr", "How much of it was training", said, columns, found, notes)
    return Told(measured, partial(pictures.ettr, found) if len(found) else None)


def otherwise(facts: Facts, of: Runs, ranking: pl.DataFrame) -> Told:
    """What other settings, or no bad nodes, would give."""
    left = whatif.left_without_lemons(ranking) if ranking["lemon"].any() else None
    found = whatif.what_if(of.sizes, facts.node_rate_per_s, without_lemons=left)
    wide = (
        found.pivot("change", index="bucket", values="ettr", maintain_order=True)
        if len(found) else pl.DataFrame({"bucket": []}, schema={"bucket": pl.Int64})
    )  # fmt: skip
    columns = [Column("bucket", "GPUs, up to", "count")]
    columns += [Column(name, name, "share") for name in wide.columns[1:]]
    said = "ETTR in the long run, exactly, with one of its causes halved and all else as it is."
    if left is not None:
        said += (
            f" Without the lemons, nodes fail {left:.3g} times as often, all jobs taken together:"
            " large ones are taken to lie on lemons as often as others do."
        )
    return Told(section("whatif", "What less would give", said, columns, wide))


def lost(facts: Facts) -> Told:
    """Figure 8 of the paper."""
    each = goodput.lost(facts.tables, facts.infra, preempted=facts.preempted)
    summed = goodput.summary(facts.tables, each)
    found = goodput.by_size(each).with_columns(pl.col("first_gpu_s", "second_gpu_s") / GPU_HOUR)
    columns = [
        Column("bucket", "GPUs, up to", "count"),
        Column("first_attempts", "failed attempts", "count"),
        Column("first_gpu_s", "GPU hours lost by them", "GPU hours"),
        Column("second_attempts", "preempted for them", "count"),
        Column("second_gpu_s", "GPU hours lost by these", "GPU hours"),
        Column("share", "share", "share"),
    ]  # fmt: skip
    said = (
        "Work that failures undid: half a checkpoint interval"
        f" ({goodput.INTERVAL_S / 120:g} minutes), or the attempt if it was shorter, times its"
        " GPUs. First order: of what infrastructure ended. Second order: of jobs that were"
        " preempted when one of these began again."
    )
    notes = []
    if summed.second_share is not None:
        whole = summed.first_gpu_s + summed.second_gpu_s
        notes = [
            f"{whole / GPU_HOUR:,.0f} GPU hours of {summed.held_gpu_s / GPU_HOUR:,.0f},"
            f" {100 * summed.second_share:.3g} % of them second order"
        ]
    told = section("goodput", "What failures cost", said, columns, found, notes)
    return Told(told, partial(pictures.goodput, found) if found["share"].sum() else None)


def again_and_again(facts: Facts) -> Told:
    """Crash loops."""
    found = loops.loops(facts.tables, facts.infra, preempted=facts.preempted).with_columns(
        pl.col("lost_gpu_s", "preempted_gpu_s") / GPU_HOUR,
        day=pl.from_epoch("since_ns", time_unit="ns").dt.date(),
    )
    found = found.filter(pl.col("infra") > 0)
    columns = [
        Column("job", "job"), Column("user", "user"), Column("gpus", "GPUs", "count"),
        Column("day", "from", "day"), Column("failures", "failures", "count"),
        Column("infra", "by infrastructure", "count"),
        Column("lost_gpu_s", "GPU hours lost", "GPU hours"),
        Column("preempted", "preempted others", "count"),
        Column("preempted_gpu_s", "GPU hours lost by these", "GPU hours"),
    ]  # fmt: skip
    said = (
        f"Jobs that failed and began again at least {loops.TIMES} times within"
        f" {loops.WINDOW_S / 3600:g} hours, infrastructure being the cause at least once."
    )
    return Told(section("loops", "Crash loops", said, columns, found))
