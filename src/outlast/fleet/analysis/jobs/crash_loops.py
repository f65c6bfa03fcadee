"""Crash loops: jobs that fail and restart repeatedly, and their cost in goodput.

Kokolis et al. 2025, III: one job of 1024 GPUs was requeued 35 times and preempted 548 others.
"""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from outlast.errors import UsageError
from outlast.fleet.analysis.exposure import KEY, SECOND_NS
from outlast.fleet.analysis.jobs import preemption_cascades
from outlast.fleet.analysis.jobs.goodput_loss import INTERVAL_S
from outlast.fleet.record_tables import Tables
from outlast.theory.argument_checks import check_positive

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
    before_s: float = preemption_cascades.BEFORE_S,
    after_s: float = preemption_cascades.AFTER_S,
    qos_rank: Mapping[str, int] | None = None,
    preempted: pl.DataFrame | None = None,
) -> pl.DataFrame:
    """Return the stretches in which a job failed and restarted at least `times` times.

    Any `times` of these failures lie within `window_s` of each other. A failure is an end in BROKEN
    that another attempt of the same id followed; `infra` counts those that infrastructure ended
    (`infra`: cluster, job, attempt). `since_ns` to `until_ns`: first to last failure; `lost_gpu_s`:
    min(runtime, `interval_s`/2) x GPUs of each, as in `goodput_loss`. Cost of the restarts to other
    jobs (`preemption_cascades`, which takes the other parameters): `preempted` attempts,
    `preempted_gpus`, `preempted_gpu_s` by the same rule. Most failures first. `preempted`: result
    of `preemption_cascades` for a superset of `restarted_attempts`, if known.
    """
    check_positive("interval_s", interval_s)
    failures = _failures(tables, infra, times, window_s)
    starters = failures.select(*JOB, attempt=pl.col("next_attempt"), loop="loop")
    if preempted is None:
        preempted = preemption_cascades.preemption_cascades(
            tables, starters.lazy(), before_s=before_s, after_s=after_s, qos_rank=qos_rank
        )
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


def restarted_attempts(
    tables: Tables, infra: pl.LazyFrame, *, times: int = TIMES, window_s: float = WINDOW_S
) -> pl.LazyFrame:
    """Return KEY of the attempts that began after a failure of a loop."""
    found = _failures(tables, infra, times, window_s)
    return found.lazy().select(*JOB, attempt="next_attempt")


def _failures(tables: Tables, infra: pl.LazyFrame, times: int, window_s: float) -> pl.DataFrame:
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
    found = (
        tables.jobs.filter(pl.col("start_ns").is_not_null())
        .join(often, on=JOB, how="semi")
        .select(*KEY, "name", "user", "state", "start_ns", "t_ns", "gpus", "nodes")
        .sort(KEY)
        .with_columns(next_attempt=pl.when(followed).then(pl.col("attempt").shift(-1)))
        .filter(broken & pl.col("next_attempt").is_not_null())
        .join(failed, on=KEY, how="left", maintain_order="left")
        .collect()
    )
    runtime_ns = (pl.col("t_ns") - pl.col("start_ns")).clip(lower_bound=0)
    new_job = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift(1)) for name in JOB)
    found = found.with_columns(
        pl.col("infra").fill_null(value=False),
        runtime_s=runtime_ns / SECOND_NS,
        of=new_job.cum_sum(),
    )
    found = found.with_columns(
        closes=_same(times - 1, pl.col("t_ns") <= pl.col("t_ns").shift(times - 1) + window_ns)
    )
    # The window that a later failure closes holds this one and, but for the last, the one before.
    closing = [_same(-ahead, pl.col("closes").shift(-ahead)) for ahead in range(times)]
    linked = pl.any_horizontal(closing[:-1])
    return found.with_columns(loop=(~linked).cum_sum(), within=linked | closing[-1]).filter(
        "within"
    )


def _same(rows: int, what: pl.Expr) -> pl.Expr:
    """Return `what` if the row so many rows ago (below 0: ahead) is of the same job."""
    return (what & (pl.col("of") == pl.col("of").shift(rows))).fill_null(value=False)


def _lost_gpu_s(interval_s: float) -> pl.Expr:
    return pl.min_horizontal("runtime_s", pl.lit(interval_s / 2)) * pl.col("gpus")
