"""Goodput lost to failures, preemption cascades and crash loops.

Kokolis et al. 2025, III and figure 8: with a checkpoint every tau, an interrupted attempt loses
min(its runtime, tau/2) x its GPUs: half an hour at a site that saves hourly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import polars as pl

from outlast.errors import UsageError
from outlast.fleet.analysis.exposure import KEY, SECOND_NS
from outlast.fleet.analysis.job_runs import size_bucket
from outlast.fleet.host_lists import explode_hosts
from outlast.fleet.record_tables import Tables
from outlast.theory.numerics import check_not_negative, check_positive

START_COLUMNS = [*KEY, "qos", "priority", "start_ns", "t_ns", "gpus", "hosts"]
BY = ["by_job", "by_attempt"]
ORDER = {
    "shared": True,
    "apart_ns": False,
    "by_priority": True,
    "by_job": False,
    "by_attempt": False,
}


@dataclass(frozen=True)
class PreemptionRule:
    """Conditions under which a start is the cause of a preemption.

    The preempted attempt ended from `before_s` before the start until `after_s` after it.
    `qos_rank`: QOS to rank; priorities decide for a QOS that it does not have.
    """

    before_s: float = 300.0
    after_s: float = 60.0
    qos_rank: Mapping[str, int] | None = None


DEFAULT_RULE = PreemptionRule()


def preemption_cascades(
    tables: Tables, starters: pl.LazyFrame, rule: PreemptionRule = DEFAULT_RULE
) -> pl.DataFrame:
    """Return the attempts that were preempted for a start of one of `starters`.

    `starters`: cluster, job, attempt. A start preempted another attempt if the two share a node,
    the other ended within the time of `rule`, and the start ranks above it: by `qos_rank` if that
    has both QOS, else by priority, if the source has any. Every start in the cluster is a
    candidate, and a preemption has one cause at most: the start with the most nodes in common, then
    the nearest in time, then the highest priority, then by job and attempt.

    Columns: KEY, gpus, t_ns and runtime_s of the preempted, by_job and by_attempt, and the number
    of shared nodes.
    """
    check_not_negative("before_s", rule.before_s)
    check_not_negative("after_s", rule.after_s)
    slot_ns = max(1, round((rule.before_s + rule.after_s) * SECOND_NS))
    wanted = starters.select(KEY).unique().collect().lazy()
    jobs = tables.jobs.select(*START_COLUMNS, "state").filter(
        pl.col("start_ns").is_not_null() & (pl.col("hosts") != "")
    )
    starting = jobs.join(wanted, on=KEY, how="semi").drop("state")
    preempted = jobs.filter(pl.col("state") == "PREEMPTED")
    ended = _ends_by_slot(preempted, slot_ns, rule).collect().lazy()
    slots = ended.select("cluster", "slot").unique()
    started = _starts_by_slot(starting, slot_ns).join(slots, on=["cluster", "slot"], how="semi")
    started = started.collect().lazy()
    near = ended.join(started, on=["cluster", "slot"], how="semi")
    pairs = _pairs(near, started, rule).collect().lazy()
    touched = pairs.select(KEY).unique().collect().lazy()
    ended = ended.join(touched, on=KEY, how="semi").collect().lazy()  # in all their slots
    slots = ended.select("cluster", "slot").unique()
    other_starts = (
        _starts_by_slot(jobs, slot_ns)
        .join(slots, on=["cluster", "slot"], how="semi")
        .join(started, on=["cluster", *BY], how="anti")
    )
    chosen = (
        pl.concat([pairs, _pairs(ended, other_starts, rule)])
        .sort(*KEY, *ORDER, descending=[False] * len(KEY) + list(ORDER.values()))
        .unique(KEY, keep="first", maintain_order=True)
    )
    cascades = chosen.join(started, on=["cluster", *BY], how="semi")
    return cascades.drop("apart_ns", "by_priority").sort(KEY).collect()


def _starts_by_slot(jobs: pl.LazyFrame, slot_ns: int) -> pl.LazyFrame:
    return jobs.select(
        "cluster",
        "hosts",
        "start_ns",
        slot=pl.col("start_ns") // slot_ns,
        by_job="job",
        by_attempt="attempt",
        by_qos="qos",
        by_priority="priority",
    )


def _ends_by_slot(jobs: pl.LazyFrame, slot_ns: int, rule: PreemptionRule) -> pl.LazyFrame:
    """Return each attempt once per slot in which a start lies near its end: one or two."""
    at = pl.col("t_ns")
    first = (at - round(rule.after_s * SECOND_NS)) // slot_ns
    last = (at + round(rule.before_s * SECOND_NS)) // slot_ns
    return jobs.select(
        *KEY,
        "hosts",
        "gpus",
        "t_ns",
        "qos",
        "priority",
        runtime_s=_runtime_s(),
        slot=pl.concat_list(first, last).list.unique(),
    ).explode("slot", empty_as_null=False)


def _pairs(ended: pl.LazyFrame, started: pl.LazyFrame, rule: PreemptionRule) -> pl.LazyFrame:
    """Return each preempted attempt with each start that may be its cause."""
    before_ns = round(rule.before_s * SECOND_NS)
    after_ns = round(rule.after_s * SECOND_NS)
    ahead_ns = pl.col("start_ns") - pl.col("t_ns")
    other = (pl.col("by_job") != pl.col("job")) | (pl.col("by_attempt") != pl.col("attempt"))
    victim = [*KEY, "gpus", "t_ns", "runtime_s"]
    return (
        explode_hosts(ended)
        .join(explode_hosts(started), on=["cluster", "slot", "node"])
        .filter(other & ahead_ns.is_between(-after_ns, before_ns) & _ranks_above(rule.qos_rank))
        .group_by(*victim, *BY, "by_priority")
        .agg(shared=pl.col("node").n_unique().cast(pl.Int64), apart_ns=ahead_ns.abs().min())
    )


def _ranks_above(qos_rank: Mapping[str, int] | None) -> pl.Expr:
    """Return whether the start ranks above the preempted attempt.

    A source without priorities excludes none: the state PREEMPTED implies a higher rank.
    """
    no_priorities = (pl.col("by_priority") == 0) & (pl.col("priority") == 0)
    by_priority = no_priorities | (pl.col("by_priority") > pl.col("priority"))
    if not qos_rank:
        return by_priority
    names = list(qos_rank)
    ranks = list(qos_rank.values())
    upper, lower = (
        pl.col(name).replace_strict(names, ranks, default=None, return_dtype=pl.Int64)
        for name in ("by_qos", "qos")
    )
    known = upper.is_not_null() & lower.is_not_null()
    return pl.when(known).then(upper > lower).otherwise(by_priority)


INTERVAL_S = 3600.0
# Orders of a loss: by a failure, by a preemption.
FIRST = 1
SECOND = 2


class GoodputLoss(NamedTuple):
    """GPU seconds held by all attempts, and lost to failures, by order.

    `second_share`: share of the second order in the loss; None without a loss.
    """

    held_gpu_s: float
    first_gpu_s: float
    second_gpu_s: float
    second_share: float | None


def lost_goodput(
    tables: Tables,
    infra: pl.LazyFrame,
    *,
    interval_s: float = INTERVAL_S,
    rule: PreemptionRule = DEFAULT_RULE,
    preempted: pl.DataFrame | None = None,
) -> pl.DataFrame:
    """Return each attempt that lost work to a failure: min(runtime, `interval_s`/2) x GPUs.

    `order` 1: infrastructure ended it (`infra`: cluster, job, attempt); 2: it was preempted when
    such a job restarted (`preemption_cascades`, by `rule`), which `by_job` and `by_attempt` name.
    `bucket`: its own size. `preempted`: result of `preemption_cascades` for a superset of
    `restarted_attempts`, if known.
    """
    check_positive("interval_s", interval_s)
    first = (
        tables.jobs.join(infra.select(KEY).unique(), on=KEY, how="semi")
        .select(
            *KEY,
            "gpus",
            "t_ns",
            runtime_s=_runtime_s(),
            by_job=pl.lit(None, pl.String),
            by_attempt=pl.lit(None, pl.Int64),
            order=pl.lit(FIRST, pl.Int64),
        )
        .collect()
    )
    restarted = restarted_attempts(tables, infra).collect()
    if preempted is None:
        preempted = preemption_cascades(tables, restarted.lazy(), rule)
    causes = restarted.select("cluster", by_job="job", by_attempt="attempt")
    second = (
        preempted.join(causes, on=["cluster", "by_job", "by_attempt"], how="semi")
        .join(first, on=KEY, how="anti")
        .with_columns(order=pl.lit(SECOND, pl.Int64))
    )
    return (
        pl.concat([first, second.select(first.columns)])
        .with_columns(size_bucket(), lost_gpu_s=_lost_gpu_s(interval_s))
        .sort("t_ns", *KEY)
    )


def restarted_attempts(tables: Tables, infra: pl.LazyFrame) -> pl.LazyFrame:
    """Return KEY of the attempts that followed one of `infra` in the same job."""
    broke = infra.select(KEY).unique().with_columns(broke=pl.lit(value=True))
    same = (pl.col("job") == pl.col("job").shift(1)) & (
        pl.col("cluster") == pl.col("cluster").shift(1)
    )
    return (
        tables.jobs.filter(pl.col("start_ns").is_not_null())
        .select(*KEY)
        .join(broke.select("cluster", "job"), on=["cluster", "job"], how="semi")
        .join(broke, on=KEY, how="left")
        .sort(KEY)
        .filter(same & pl.col("broke").shift(1))
        .select(KEY)
    )


def loss_by_size(table: pl.DataFrame) -> pl.DataFrame:
    """Sum `lost_goodput` by size: `attempts` and GPU seconds of either order, and the share of the
    loss."""
    columns: dict[str, pl.Expr] = {}
    for order, name in ((FIRST, "first"), (SECOND, "second")):
        of = pl.col("order") == order
        columns[f"{name}_attempts"] = of.sum().cast(pl.Int64)
        columns[f"{name}_gpu_s"] = pl.col("lost_gpu_s").filter(of).sum()
    both = pl.col("first_gpu_s") + pl.col("second_gpu_s")
    share = pl.when(both.sum() > 0).then(both / both.sum())
    return table.group_by("bucket").agg(**columns).sort("bucket").with_columns(share=share)


def total_loss(tables: Tables, table: pl.DataFrame) -> GoodputLoss:
    """Sum `lost_goodput` over all sizes."""
    held_gpu_s = tables.jobs.select((_runtime_s() * pl.col("gpus")).sum()).collect().item()
    first, second = (
        float(table["lost_gpu_s"].filter(table["order"] == order).sum())
        for order in (FIRST, SECOND)
    )
    both = first + second
    return GoodputLoss(float(held_gpu_s), first, second, second / both if both else None)


def _runtime_s() -> pl.Expr:
    span_ns = (pl.col("t_ns") - pl.col("start_ns")).clip(lower_bound=0)
    return (span_ns / SECOND_NS).fill_null(0.0)


TIMES = 3
WINDOW_S = 86_400.0
BROKEN = ("FAILED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "REQUEUED")
JOB = ["cluster", "job"]


def find_crash_loops(
    tables: Tables,
    infra: pl.LazyFrame,
    *,
    times: int = TIMES,
    window_s: float = WINDOW_S,
    interval_s: float = INTERVAL_S,
    rule: PreemptionRule = DEFAULT_RULE,
    preempted: pl.DataFrame | None = None,
) -> pl.DataFrame:
    """Return the stretches in which a job failed and restarted at least `times` times.

    Any `times` of these failures lie within `window_s` of each other. A failure is an end in BROKEN
    that another attempt of the same id followed; `infra` counts those that infrastructure ended
    (`infra`: cluster, job, attempt). `since_ns` to `until_ns`: first to last failure; `lost_gpu_s`:
    min(runtime, `interval_s`/2) x GPUs of each, as in `goodput_loss`. Cost of the restarts to other
    jobs (`preemption_cascades`, by `rule`): `preempted` attempts, `preempted_gpus`,
    `preempted_gpu_s`, lost likewise. Most failures first. `preempted`: result of
    `preemption_cascades` for a superset of `restarted_attempts`, if known.
    """
    check_positive("interval_s", interval_s)
    failures = _find_loops(tables, infra, times, window_s)
    starters = failures.select(*JOB, attempt=pl.col("next_attempt"), loop="loop")
    if preempted is None:
        preempted = preemption_cascades(tables, starters.lazy(), rule)
    cost = (
        preempted.join(
            starters.rename({"job": "by_job", "attempt": "by_attempt"}),
            on=["cluster", "by_job", "by_attempt"],
        )
        .group_by("loop")
        .agg(
            preempted=pl.len().cast(pl.Int64),
            preempted_gpus=pl.col("gpus").sum(),
            preempted_gpu_s=_lost_gpu_s(interval_s).sum(),
        )
    )
    return (
        failures.group_by("loop")
        .agg(
            *(pl.col(name).first() for name in (*JOB, "name", "user", "gpus", "nodes")),
            failures=pl.len().cast(pl.Int64),
            infra=pl.col("infra").sum().cast(pl.Int64),
            since_ns=pl.col("t_ns").min(),
            until_ns=pl.col("t_ns").max(),
            lost_gpu_s=_lost_gpu_s(interval_s).sum(),
        )
        .join(cost, on="loop", how="left")
        .with_columns(pl.col("^preempted.*$").fill_null(0))
        .sort(["failures", "since_ns", *JOB], descending=[True, False, False, False])
        .drop("loop")
    )


def attempts_in_loops(
    tables: Tables, infra: pl.LazyFrame, *, times: int = TIMES, window_s: float = WINDOW_S
) -> pl.LazyFrame:
    """Return KEY of the attempts that began after a failure of a loop."""
    table = _find_loops(tables, infra, times, window_s)
    return table.lazy().select(*JOB, attempt="next_attempt")


def _find_loops(tables: Tables, infra: pl.LazyFrame, times: int, window_s: float) -> pl.DataFrame:
    """Return the failures that are in a loop, with the number of the loop."""
    if times < 2:
        raise UsageError(f"times must be 2 or more, not {times!r}: one failure is no loop")
    check_positive("window_s", window_s)
    window_ns = round(window_s * SECOND_NS)
    broken = pl.col("state").is_in(BROKEN)
    often = tables.jobs.filter(broken).group_by(JOB).len().filter(pl.col("len") >= times)
    failed = infra.select(KEY).unique().with_columns(infra=pl.lit(value=True))
    followed = (pl.col("job") == pl.col("job").shift(-1)) & (
        pl.col("cluster") == pl.col("cluster").shift(-1)
    )
    table = (
        tables.jobs.filter(pl.col("start_ns").is_not_null())
        .join(often, on=JOB, how="semi")
        .select(*KEY, "name", "user", "state", "start_ns", "t_ns", "gpus", "nodes")
        .sort(KEY)
        .with_columns(next_attempt=pl.when(followed).then(pl.col("attempt").shift(-1)))
        .filter(broken & pl.col("next_attempt").is_not_null())
        .join(failed, on=KEY, how="left", maintain_order="left")
        .collect()
    )
    new_job = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift(1)) for name in JOB)
    table = table.with_columns(
        pl.col("infra").fill_null(value=False), runtime_s=_runtime_s(), of=new_job.cum_sum()
    )
    table = table.with_columns(
        closes=_within_job(times - 1, pl.col("t_ns") <= pl.col("t_ns").shift(times - 1) + window_ns)
    )
    # The window that a later failure closes holds this one and, but for the last, the one before.
    closing = [_within_job(-ahead, pl.col("closes").shift(-ahead)) for ahead in range(times)]
    linked = pl.any_horizontal(closing[:-1])
    return table.with_columns(loop=(~linked).cum_sum(), within=linked | closing[-1]).filter(
        "within"
    )


def _within_job(rows: int, what: pl.Expr) -> pl.Expr:
    """Return `what` if the row so many rows ago (below 0: ahead) is of the same job."""
    return (what & (pl.col("of") == pl.col("of").shift(rows))).fill_null(value=False)


def _lost_gpu_s(interval_s: float) -> pl.Expr:
    return pl.min_horizontal("runtime_s", pl.lit(interval_s / 2)) * pl.col("gpus")
