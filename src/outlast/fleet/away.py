"""Nodes that went away, where no job says what that cost: a trace of faults, a log of repairs."""

from __future__ import annotations

import polars as pl

from outlast.fleet.blame import NODE
from outlast.fleet.outages import down_times
from outlast.fleet.present import present
from outlast.fleet.tables import DAY_NS, Tables


def went_away(tables: Tables) -> pl.LazyFrame:
    """Outages as failures, each certainly its node's, in the columns of `blame.events`."""
    return tables.outages.select(*NODE, "t_ns", weight=pl.lit(1.0), named=pl.lit(value=True))


def up(tables: Tables) -> pl.LazyFrame:
    """By node: `node_days` in the window that the cluster had it and it was not away."""
    down = (
        down_times(tables)
        .group_by(NODE)
        .agg(down=(pl.col("end_ns") - pl.col("begin_ns")).sum() / DAY_NS)
    )
    left = (pl.col("days") - pl.col("down").fill_null(0.0)).clip(lower_bound=0)
    return present(tables).join(down, on=NODE, how="left").lazy().select(*NODE, node_days=left)
