"""Which nodes a cluster has, and since when."""

from __future__ import annotations

import polars as pl

from outlast.fleet.tables import DAY_NS, Tables


def present(tables: Tables) -> pl.DataFrame:
    """`cluster`, `node`, `begin_ns` and the `days` of the window in which the cluster had it: from
    its first NodeSeen on. A node that nobody said so of and that an outage, a finding or a repair
    names was there all the time. Where there is no NodeSeen at all, so was one that a job had for
    itself; nodes of which no record says anything are missing then, and rates come out too high.
    """
    seen = tables.nodes.filter(pl.col("t_ns") < tables.until_ns).select("cluster", "node", "t_ns")
    begun = pl.lit(tables.since_ns, dtype=pl.Int64).alias("t_ns")
    named = [
        each.select("cluster", "node").unique().with_columns(begun)
        for each in (tables.outages, tables.findings, tables.repairs)
    ]
    alone = tables.jobs.filter(pl.col("nodes") == 1, pl.col("hosts") != "")
    if seen.select(pl.len()).collect().item():
        named = [each.join(seen, on=["cluster", "node"], how="anti") for each in named]
    else:
        named.append(alone.select("cluster", node="hosts").unique().with_columns(begun))
    return (
        pl.concat([seen, *named])
        .group_by("cluster", "node")
        .agg(begin_ns=pl.col("t_ns").min().clip(lower_bound=tables.since_ns))
        .with_columns(days=(tables.until_ns - pl.col("begin_ns")) / DAY_NS)
        .sort("cluster", "node")
        .collect()
    )
