"""How long jobs held nodes and GPUs: what failures are counted over."""

from __future__ import annotations

import polars as pl

from outlast.fleet.tables import Tables

KEY = ("cluster", "job", "attempt")
SECOND_NS = 10**9
HOUR_S = 3600.0
DAY_S = 86_400.0
NODE_GPUS = 8


def attempts(tables: Tables) -> pl.LazyFrame:
    """The attempts that held nodes in the window, with

    - `begin_ns` and `ran_s`: from when on, and for how many seconds they held them inside the
      window: time in which a failure would have been counted, and no other. One that ended after
      the window, or is RUNNING, counts until the window ends or it was last seen. 0 where it ended
      before it began.
    - `node_days`, `gpu_hours`: that times its nodes or GPUs.
    - `ended`: its end lies in the window, so that it can have failed there.
    - `run`: one user's jobs of one name (or the job, where it has none): what is begun again and
      again belongs together.
    """
    begin = pl.col("start_ns").clip(lower_bound=tables.since_ns)
    end = pl.col("t_ns").clip(upper_bound=tables.until_ns)
    inside = pl.col("t_ns").is_between(tables.since_ns, tables.until_ns, closed="left")
    named = pl.when(pl.col("name") != "").then(pl.col("name")).otherwise(pl.col("job"))
    ran = (end - begin).clip(lower_bound=0) / SECOND_NS
    return (
        tables.jobs.filter(
            pl.col("start_ns").is_not_null(),
            pl.col("start_ns") < tables.until_ns,
            pl.col("t_ns") >= tables.since_ns,
        )
        .with_columns(
            begin_ns=begin,
            ran_s=ran,
            ended=inside & (pl.col("state") != "RUNNING"),
            run=pl.struct("cluster", "user", named.alias("named")).hash(),
        )
        .with_columns(
            node_days=pl.col("nodes") * pl.col("ran_s") / DAY_S,
            gpu_hours=pl.col("gpus") * pl.col("ran_s") / HOUR_S,
        )
    )


def on_gpus(tables: Tables) -> pl.LazyFrame:
    """`attempts` that held GPUs."""
    return attempts(tables).filter(pl.col("gpus") > 0)


def in_whole_nodes(gpus: pl.Expr, node_gpus: int = NODE_GPUS) -> pl.Expr:
    """GPUs rounded up to the next multiple of a node's."""
    return (gpus + node_gpus - 1) // node_gpus * node_gpus
