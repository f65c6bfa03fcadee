"""How large jobs are, by their number and by the GPU time that they held (Kokolis et al. 2025,
Fig. 6)."""

from __future__ import annotations

import polars as pl

from outlast.fleet.exposure import HOUR_S, SECOND_NS
from outlast.fleet.job_runs import size_bucket
from outlast.fleet.tables import Tables


def sizes(tables: Tables) -> pl.DataFrame:
    """Attempts by GPUs, rounded up to a power of two (`gpus`; 0: without GPUs): how many `jobs`,
    their `gpu_hours` from start to end, both as shares of all, and the shares of all that are at
    least so large (`jobs_from`, `gpu_hours_from`). Only attempts that started."""
    held_s = ((pl.col("t_ns") - pl.col("start_ns")) / SECOND_NS).clip(lower_bound=0)
    counted = (
        tables.jobs.filter(
            pl.col("t_ns").is_between(tables.since_ns, tables.until_ns, closed="left"),
            pl.col("start_ns").is_not_null(),
        )
        .select("gpus", size=size_bucket(), held_s=held_s)
        .group_by("size")
        .agg(
            jobs=pl.len().cast(pl.Int64),
            gpu_hours=(pl.col("gpus") * pl.col("held_s")).sum() / HOUR_S,
        )
        .sort("size")
        .collect()
    )
    return counted.rename({"size": "gpus"}).with_columns(
        *(_share(pl.col(name), name).alias(f"{name}_share") for name in ("jobs", "gpu_hours")),
        *(
            _share(pl.col(name).cum_sum(reverse=True), name).alias(f"{name}_from")
            for name in ("jobs", "gpu_hours")
        ),
    )


def _share(of: pl.Expr, name: str) -> pl.Expr:
    whole = pl.col(name).sum()
    return pl.when(whole > 0).then(of / whole).otherwise(0.0)
