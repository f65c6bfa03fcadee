"""Goodput lost to failures, and to preemptions by the jobs that they restart.

Kokolis et al. 2025, III and figure 8: with a checkpoint every tau, an interrupted attempt loses
min(its runtime, tau/2) x its GPUs: half an hour at a site that saves hourly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import polars as pl

from outlast.fleet.analysis.exposure import KEY, SECOND_NS
from outlast.fleet.analysis.jobs import preemption_cascades
from outlast.fleet.analysis.jobs.job_runs import size_bucket
from outlast.fleet.record_tables import Tables
from outlast.theory.argument_checks import check_positive

INTERVAL_S = 3600.0
FIRST, SECOND = 1, 2  # orders


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
    before_s: float = preemption_cascades.BEFORE_S,
    after_s: float = preemption_cascades.AFTER_S,
    qos_rank: Mapping[str, int] | None = None,
    preempted: pl.DataFrame | None = None,
) -> pl.DataFrame:
    """Return each attempt that lost work to a failure: min(runtime, `interval_s`/2) x GPUs.

    `order` 1: infrastructure ended it (`infra`: cluster, job, attempt); 2: it was preempted when
    such a job restarted (`preemption_cascades`, which takes the other parameters), which `by_job`
    and `by_attempt` name. `bucket`: its own size. `preempted`: result of `preemption_cascades` for
    a superset of `restarted_attempts`, if known.
    """
    check_positive("interval_s", interval_s)
    first = (
        tables.jobs.join(infra.select(KEY).unique(), on=KEY, how="semi")
        .select(*KEY, "gpus", "t_ns", runtime_s=_runtime_s(), by_job=pl.lit(None, pl.String),
                by_attempt=pl.lit(None, pl.Int64), order=pl.lit(FIRST, pl.Int64))
        .collect()
    )  # fmt: skip
    again = restarted_attempts(tables, infra).collect()
    if preempted is None:
        preempted = preemption_cascades.preemption_cascades(
            tables, again.lazy(), before_s=before_s, after_s=after_s, qos_rank=qos_rank
        )
    ours = again.select("cluster", by_job="job", by_attempt="attempt")
    second = (
        preempted.join(ours, on=["cluster", "by_job", "by_attempt"], how="semi")
        .join(first, on=KEY, how="anti")
        .with_columns(order=pl.lit(SECOND, pl.Int64))
    )
    return (
        pl.concat([first, second.select(first.columns)])
        .with_columns(
            size_bucket(),
            lost_gpu_s=pl.min_horizontal("runtime_s", pl.lit(interval_s / 2)) * pl.col("gpus"),
        )
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


def loss_by_size(found: pl.DataFrame) -> pl.DataFrame:
    """Sum `lost_goodput` by size: `attempts` and GPU seconds of either order, and the share of the
    loss."""
    columns: dict[str, pl.Expr] = {}
    for order, name in ((FIRST, "first"), (SECOND, "second")):
        of = pl.col("order") == order
        columns[f"{name}_attempts"] = of.sum().cast(pl.Int64)
        columns[f"{name}_gpu_s"] = pl.col("lost_gpu_s").filter(of).sum()
    both = pl.col("first_gpu_s") + pl.col("second_gpu_s")
    share = pl.when(both.sum() > 0).then(both / both.sum())
    return found.group_by("bucket").agg(**columns).sort("bucket").with_columns(share=share)


def total_loss(tables: Tables, found: pl.DataFrame) -> GoodputLoss:
    """Sum `lost_goodput` over all sizes."""
    held_gpu_s = tables.jobs.select((_runtime_s() * pl.col("gpus")).sum()).collect().item()
    first, second = (
        float(found["lost_gpu_s"].filter(found["order"] == order).sum())
        for order in (FIRST, SECOND)
    )
    both = first + second
    return GoodputLoss(float(held_gpu_s), first, second, second / both if both else None)


def _runtime_s() -> pl.Expr:
    span_ns = (pl.col("t_ns") - pl.col("start_ns")).clip(lower_bound=0)
    return (span_ns / SECOND_NS).fill_null(0.0)
