"""How jobs ended, by their number and by the GPU time that they held (Kokolis et al. 2025,
Fig. 3)."""

from __future__ import annotations

import polars as pl

from outlast.fleet.attribution import Attributed
from outlast.fleet.exposure import HOUR_S, KEY, SECOND_NS
from outlast.fleet.tables import Tables


def states(tables: Tables, found: Attributed) -> pl.DataFrame:
    """For each state, once for attempts that infrastructure ended (`hw`) and once for the others:
    how many `jobs` (attempts, as a scheduler counts them), their `gpu_hours` from start to end,
    and both as shares of all. Most GPU time first.

    Jobs that never started count, with no GPU time. Those whose end is before their start are as
    such (`backwards`).
    """
    hw = found.failures.lazy().select(KEY).with_columns(hw=pl.lit(value=True))
    held_s = (pl.col("t_ns") - pl.col("start_ns")).fill_null(0) / SECOND_NS
    counted = (
        tables.jobs.filter(
            pl.col("t_ns").is_between(tables.since_ns, tables.until_ns, closed="left")
        )
        .select(*KEY, "state", "gpus", held_s=held_s)
        .join(hw, on=KEY, how="left")
        .group_by("state", pl.col("hw").fill_null(value=False))
        .agg(
            jobs=pl.len().cast(pl.Int64),
            gpu_hours=(pl.col("gpus") * pl.col("held_s").clip(lower_bound=0)).sum() / HOUR_S,
            backwards=(pl.col("held_s") < 0).sum().cast(pl.Int64),
        )
        .collect()
    )
    return counted.select(
        pl.col("state").cast(pl.String),
        "hw",
        "jobs",
        _share("jobs"),
        "gpu_hours",
        _share("gpu_hours"),
        "backwards",
    ).sort(["gpu_hours", "jobs", "state"], descending=[True, True, False])


def _share(name: str) -> pl.Expr:
    whole = pl.col(name).sum()
    return pl.when(whole > 0).then(pl.col(name) / whole).otherwise(0.0).alias(f"{name}_share")
