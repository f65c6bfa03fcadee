"""How often parts are exchanged (Kokolis et al. 2025, III: RSC-1's GPUs three times as often as
RSC-2's)."""

from __future__ import annotations

import polars as pl

from outlast.fleet.intervals import with_rates
from outlast.fleet.present import present
from outlast.fleet.tables import Tables


def swaps(tables: Tables) -> pl.DataFrame:
    """For each `part` of the repairs of kind `swap`: how many (`swaps`), on how many `nodes` of
    those that the cluster has, and `per_1000_node_days` of its nodes being there, with both
    intervals (`intervals.with_rates`)."""
    there = present(tables)
    counted = (
        tables.repairs.filter(
            pl.col("kind") == "swap",
            pl.col("t_ns").is_between(tables.since_ns, tables.until_ns, closed="left"),
        )
        .group_by(part=pl.col("part").str.to_lowercase())
        .agg(
            swaps=pl.len().cast(pl.Int64),
            nodes=pl.struct("cluster", "node").n_unique().cast(pl.Int64),
        )
        .sort(["swaps", "part"], descending=[True, False])
        .collect()
    )
    days = float(there["days"].sum())
    told = with_rates(
        counted.with_columns(days=pl.lit(days)), "swaps", "days", "per_1000_node_days"
    )
    return told.with_columns(pl.col(r"^per_1000.*$") * 1000).rename({"days": "node_days"})
