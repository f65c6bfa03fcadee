"""Preemption cascades: the job starts for which other jobs were preempted."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from outlast.fleet.analysis.exposure import KEY, SECOND_NS
from outlast.fleet.host_lists import explode_hosts
from outlast.fleet.record_tables import Tables
from outlast.theory.argument_checks import check_not_negative

BEFORE_S, AFTER_S = 300.0, 60.0
START_COLUMNS = [*KEY, "qos", "priority", "start_ns", "t_ns", "gpus", "hosts"]
BY = ["by_job", "by_attempt"]
ORDER = {"shared": True, "apart_ns": False, "by_priority": True, "by_job": False,
         "by_attempt": False}  # fmt: skip


def preemption_cascades(
    tables: Tables,
    starters: pl.LazyFrame,
    *,
    before_s: float = BEFORE_S,
    after_s: float = AFTER_S,
    qos_rank: Mapping[str, int] | None = None,
) -> pl.DataFrame:
    """Return the attempts that were preempted for a start of one of `starters`.

    `starters`: cluster, job, attempt. A start preempted another attempt if the two share a node,
    the other ended from `before_s` before the start until `after_s` after it, and the start ranks
    above it: by `qos_rank` if that has both QOS, else by priority, if the source has any. Every
    start in the cluster is a candidate, and a preemption has one cause at most: the start with the
    most nodes in common, then the nearest in time, then the highest priority, then by job and
    attempt.

    Columns: KEY, gpus, t_ns and runtime_s of the preempted, by_job and by_attempt, and the number
    of shared nodes.
    """
    check_not_negative("before_s", before_s)
    check_not_negative("after_s", after_s)
    slot_ns = max(1, round((before_s + after_s) * SECOND_NS))
    wanted = starters.select(KEY).unique().collect().lazy()
    jobs = tables.jobs.select(*START_COLUMNS, "state").filter(
        pl.col("start_ns").is_not_null() & (pl.col("hosts") != "")
    )
    starting = jobs.join(wanted, on=KEY, how="semi").drop("state")
    preempted = jobs.filter(pl.col("state") == "PREEMPTED")
    ended = _ended(preempted, slot_ns, before_s, after_s).collect().lazy()
    slots = ended.select("cluster", "slot").unique()
    started = _started(starting, slot_ns).join(slots, on=["cluster", "slot"], how="semi")
    started = started.collect().lazy()
    near = ended.join(started, on=["cluster", "slot"], how="semi")
    ours = _pairs(near, started, before_s, after_s, qos_rank).collect().lazy()
    touched = ours.select(KEY).unique().collect().lazy()
    ended = ended.join(touched, on=KEY, how="semi").collect().lazy()  # in all their slots
    slots = ended.select("cluster", "slot").unique()
    rivals = (
        _started(jobs, slot_ns)
        .join(slots, on=["cluster", "slot"], how="semi")
        .join(started, on=["cluster", *BY], how="anti")
    )
    chosen = (
        pl.concat([ours, _pairs(ended, rivals, before_s, after_s, qos_rank)])
        .sort(*KEY, *ORDER, descending=[False] * len(KEY) + list(ORDER.values()))
        .unique(KEY, keep="first", maintain_order=True)
    )
    found = chosen.join(started, on=["cluster", *BY], how="semi")
    return found.drop("apart_ns", "by_priority").sort(KEY).collect()


def _started(jobs: pl.LazyFrame, slot_ns: int) -> pl.LazyFrame:
    return jobs.select(
        "cluster", "hosts", "start_ns", slot=pl.col("start_ns") // slot_ns, by_job="job",
        by_attempt="attempt", by_qos="qos", by_priority="priority",
    )  # fmt: skip


def _ended(jobs: pl.LazyFrame, slot_ns: int, before_s: float, after_s: float) -> pl.LazyFrame:
    """Return each attempt once per slot in which a start lies near its end: one or two."""
    at = pl.col("t_ns")
    first = (at - round(after_s * SECOND_NS)) // slot_ns
    last = (at + round(before_s * SECOND_NS)) // slot_ns
    runtime_s = ((at - pl.col("start_ns")) / SECOND_NS).clip(lower_bound=0)
    return (
        jobs.select(
            *KEY, "hosts", "gpus", "t_ns", "qos", "priority", runtime_s=runtime_s,
            slot=pl.concat_list(first, last).list.unique(),
        )
        .explode("slot", empty_as_null=False)
    )  # fmt: skip


def _pairs(
    ended: pl.LazyFrame,
    started: pl.LazyFrame,
    before_s: float,
    after_s: float,
    qos_rank: Mapping[str, int] | None,
) -> pl.LazyFrame:
    """Return each preempted attempt with each start that may be its cause."""
    before_ns, after_ns = round(before_s * SECOND_NS), round(after_s * SECOND_NS)
    ahead_ns = pl.col("start_ns") - pl.col("t_ns")
    other = (pl.col("by_job") != pl.col("job")) | (pl.col("by_attempt") != pl.col("attempt"))
    victim = [*KEY, "gpus", "t_ns", "runtime_s"]
    return (
        explode_hosts(ended)
        .join(explode_hosts(started), on=["cluster", "slot", "node"])
        .filter(other & ahead_ns.is_between(-after_ns, before_ns) & _above(qos_rank))
        .group_by(*victim, *BY, "by_priority")
        .agg(shared=pl.col("node").n_unique().cast(pl.Int64), apart_ns=ahead_ns.abs().min())
    )


def _above(qos_rank: Mapping[str, int] | None) -> pl.Expr:
    """Return whether the start ranks above the preempted attempt.

    A source without priorities excludes none: the state PREEMPTED implies a higher rank.
    """
    unsaid = (pl.col("by_priority") == 0) & (pl.col("priority") == 0)
    by_priority = unsaid | (pl.col("by_priority") > pl.col("priority"))
    if not qos_rank:
        return by_priority
    names, ranks = list(qos_rank), list(qos_rank.values())
    upper, lower = (
        pl.col(name).replace_strict(names, ranks, default=None, return_dtype=pl.Int64)
        for name in ("by_qos", "qos")
    )
    known = upper.is_not_null() & lower.is_not_null()
    return pl.when(known).then(upper > lower).otherwise(by_priority)
