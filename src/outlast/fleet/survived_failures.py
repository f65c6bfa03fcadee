"""Failures that jobs survived, as runs of `outlast run` report them: accounting shows none of them,
since the attempt went on."""

from __future__ import annotations

import polars as pl

from outlast.fleet.tables import Tables


def survived_failures(tables: Tables, above_gpus: int) -> pl.DataFrame:
    """Return the failures of the window after which their job went on, one row each, as
    `Interruption` has them: those of jobs above this size."""
    inside = pl.col("t_ns").is_between(tables.since_ns, tables.until_ns, closed="left")
    return tables.interruptions.filter(inside, pl.col("gpus") > above_gpus).collect()


def survived_by_cause(tables: Tables) -> pl.DataFrame:
    """Count survived failures: `cause` (a kind of fault), `rung` (of the recovery ladder),
    `failures`, `nodes` (hosts on which they were), `lost_nodes` (failures that took their host),
    `pause_s` (mean time until every rank had committed the interrupted step)."""
    return (
        survived_failures(tables, -1)
        .group_by("cause", "rung")
        .agg(
            failures=pl.len().cast(pl.Int64),
            nodes=pl.struct("cluster", "node").n_unique().cast(pl.Int64),
            lost_nodes=(pl.col("took_node") > 0).sum().cast(pl.Int64),
            pause_s=pl.col("length_ns").mean() / 1e9,
        )
        .sort(["failures", "cause", "rung"], descending=[True, False, False])
    )
