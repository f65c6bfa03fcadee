"""Time that was spent on something, by the days on which it was spent."""

from __future__ import annotations

import polars as pl

from outlast.fleet.exposure import DAY_S, SECOND_NS, attempts, has_gpus, on_gpus
from outlast.fleet.tables import DAY_NS, Tables


def jobs_by_day(tables: Tables) -> pl.DataFrame:
    """Return `node_days` that jobs held on each `day` of the window (days since 1970, UTC): of jobs
    on GPUs, where there is any, by the share of a node's GPUs that they hold."""
    end_ns = pl.col("begin_ns") + (pl.col("ran_s") * SECOND_NS).cast(pl.Int64)
    ran = on_gpus(tables) if has_gpus(tables) else attempts(tables)
    held = ran.select("begin_ns", nodes="held_nodes", end_ns=end_ns)
    return spent(held, tables).rename({"spent": "node_days"})


def spent(held: pl.LazyFrame, tables: Tables) -> pl.DataFrame:
    """Days that `nodes` were held from `begin_ns` to `end_ns`, by the `day` on which they were, for
    every day of the window (since 1970, UTC; the last may be a part of one).

    With A(t) = sum of nodes x (t - begin) over what began before t, and B(t) the same of ends, up
    to a day's end A - B was held: two sums by day, and no row for each job and day.
    """
    first, last = tables.since_ns // DAY_NS, (tables.until_ns - 1) // DAY_NS
    days = pl.DataFrame({"day": range(first, last + 1)}, schema={"day": pl.Int64})
    so_far = _since(held, "begin_ns", days) - _since(held, "end_ns", days)
    return days.with_columns(spent=(so_far - so_far.shift(1, fill_value=0.0)).clip(lower_bound=0))


def whole_days(calendar: pl.DataFrame, tables: Tables) -> pl.DataFrame:
    """Those days of a calendar of which the window has all."""
    begun, over = pl.col("day") * DAY_NS, (pl.col("day") + 1) * DAY_NS
    return calendar.filter(begun >= tables.since_ns, over <= tables.until_ns)


def per_1000(failures: str, node_days: str) -> pl.Expr:
    """Null where next to no time was spent."""
    spent_days = pl.col(node_days)
    return pl.when(spent_days > 1e-6).then(1000 * pl.col(failures) / spent_days)


def _since(held: pl.LazyFrame, moment: str, days: pl.DataFrame) -> pl.Series:
    """Node-days from the moments on, up to the end of each day."""
    origin_ns = int(days["day"][0]) * DAY_NS
    on = (pl.col(moment) - origin_ns) / (SECOND_NS * DAY_S)
    day = pl.min_horizontal(pl.col(moment) // DAY_NS, pl.lit(int(days["day"][-1])))
    sums = (
        held.group_by(day=day)
        .agg(nodes=pl.col("nodes").sum(), begun=(pl.col("nodes") * on).sum())
        .collect()
    )
    told = days.join(sums, on="day", how="left", maintain_order="left").fill_null(0)
    passed = (told["day"] - told["day"][0] + 1).cast(pl.Float64)
    return passed * told["nodes"].cum_sum() - told["begun"].cum_sum()
