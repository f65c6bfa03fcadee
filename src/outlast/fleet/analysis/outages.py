"""Node outages, repair times, part replacements, and the failures that outages follow."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import polars as pl

from outlast.fleet.analysis.confidence_intervals import jeffreys, with_rates
from outlast.fleet.analysis.exposure import (
    KEY,
    SECOND_NS,
    node_days_by_day,
    node_inventory,
    per_1000,
    whole_days,
)
from outlast.fleet.analysis.failure_attribution import (
    AFTER_S,
    BEFORE_S,
    CAUSES,
    NODE,
    AttributedFailures,
    attribute_to_nodes,
    worst_nodes,
)
from outlast.fleet.host_lists import explode_hosts
from outlast.fleet.record_tables import DAY_NS, Tables

ROLLING_DAYS = 30


class OutageRate(msgspec.Struct, frozen=True, kw_only=True):
    """Outages that began in the window, per 1000 node-days up.

    `low` to `high`: 90 %, of Gamma(outages + 1/2, node_days), for independent ones. Variance over
    mean, of outages by node and by whole day (1: independent); `swing`: the highest rate of 30 days
    over the lowest, None with fewer than two such stretches or one without any outage.
    """

    outages: int
    nodes: int
    node_days: float
    down_days: float
    per_1000_node_days: float | None
    low: float | None
    high: float | None
    per_node_variance: float | None
    per_day_variance: float | None
    swing: float | None

    @property
    def sure_as(self) -> float:
        """Number of independent outages with the same certainty."""
        return self.outages / max(1.0, self.per_node_variance or 1.0, self.per_day_variance or 1.0)


def outage_rate(tables: Tables, nodes: pl.DataFrame | None = None) -> OutageRate:
    """Return outages per node-day up: node-days of all `nodes` (`node_inventory`) less downtime."""
    nodes = node_inventory(tables) if nodes is None else nodes
    calendar = outages_by_day(tables, nodes)
    days = whole_days(calendar, tables)
    begun = int(calendar["outages"].sum())
    up = float(calendar["node_days"].sum())
    down = float(calendar["down_days"].sum())
    of_nodes = nodes.join(
        _outages_of_window(tables).group_by("cluster", "node").agg(begun=pl.len()).collect(),
        on=["cluster", "node"],
        how="left",
    )["begun"].fill_null(0)
    per = 1000 / up if up > 1e-6 else None
    low, high = jeffreys(begun)
    return OutageRate(
        outages=begun,
        nodes=len(nodes),
        node_days=up,
        down_days=down,
        per_1000_node_days=per and begun * per,
        low=per and low * per,
        high=per and high * per,
        per_node_variance=_over_mean(of_nodes),
        per_day_variance=_over_mean(days["outages"]),
        swing=_swing(rolling_outages(days)),
    )


def outages_by_day(tables: Tables, nodes: pl.DataFrame | None = None) -> pl.DataFrame:
    """Return the `outages` that began on each `day` (since 1970, UTC), `node_days` up and
    `down_days`. `nodes`: of `node_inventory`."""
    nodes = node_inventory(tables) if nodes is None else nodes
    there = nodes.lazy().select("begin_ns", nodes=pl.lit(1), end_ns=tables.until_ns)
    down = down_times(tables).lazy().select("begin_ns", "end_ns", nodes=pl.lit(1))
    counts = (
        _outages_of_window(tables)
        .group_by(day=pl.col("t_ns") // DAY_NS)
        .agg(outages=pl.len())
        .collect()
    )
    return (
        node_days_by_day(there, tables)
        .join(
            node_days_by_day(down, tables).rename({"spent": "down_days"}),
            on="day",
            maintain_order="left",
        )
        .join(counts, on="day", how="left", maintain_order="left")
        .select(
            "day",
            pl.col("outages").fill_null(0).cast(pl.Int64),
            (pl.col("spent") - pl.col("down_days")).clip(lower_bound=0).alias("node_days"),
            "down_days",
        )
    )


def outages_by_symptom(tables: Tables) -> pl.DataFrame:
    """Count outages by symptom, the most frequent first.

    `symptom`, `outages` that began in the window, on how many `nodes`, `per_1000_node_days` up with
    both intervals (`confidence_intervals.with_rates`), and `median_h`, the median length in hours
    of those that ended.
    """
    up = float(outages_by_day(tables)["node_days"].sum())
    ended = pl.col("until_ns").is_between(pl.col("t_ns"), tables.until_ns)
    took_h = (pl.col("until_ns") - pl.col("t_ns")) / SECOND_NS / 3600
    found = (
        _outages_of_window(tables)
        .group_by(symptom=pl.col("symptom").cast(pl.String))
        .agg(
            outages=pl.len().cast(pl.Int64),
            nodes=pl.struct("cluster", "node").n_unique().cast(pl.Int64),
            median_h=took_h.filter(ended).median(),
        )
        .sort(["outages", "symptom"], descending=[True, False])
        .with_columns(node_days=pl.lit(up))
        .collect()
    )
    rates = with_rates(found, "outages", "node_days", "per_1000_node_days")
    return rates.with_columns(pl.col(r"^per_1000.*$") * 1000)


def rolling_outages(calendar: pl.DataFrame, days: int = ROLLING_DAYS) -> pl.DataFrame:
    """Return the rates of `outages_by_day` over the `days` up to each day, complete ones only."""
    return (
        calendar.with_columns(pl.col("outages", "node_days").rolling_sum(days, min_samples=days))
        .drop_nulls("outages")
        .select(
            pl.col("day").cast(pl.Int32).cast(pl.Date),
            "outages",
            "node_days",
            per_1000_node_days=per_1000("outages", "node_days"),
        )
    )


def down_times(tables: Tables) -> pl.DataFrame:
    """Return the times that nodes were down: `cluster`, `node`, `begin_ns`, `end_ns`.

    Overlaps of a node's outages count once. An outage without an end lasts until the window's end.
    """
    over = ("cluster", "node")
    until = pl.col("until_ns").fill_null(tables.until_ns).clip(upper_bound=tables.until_ns)
    covered = pl.col("end_ns").cum_max().shift(1).over(over, order_by="begin_ns")
    return (
        tables.outages.select(
            *over, begin_ns=pl.col("t_ns").clip(lower_bound=tables.since_ns), end_ns=until
        )
        .filter(pl.col("end_ns") > pl.col("begin_ns"))
        .sort(*over, "begin_ns")
        .with_columns(begin_ns=pl.max_horizontal("begin_ns", covered))
        .filter(pl.col("end_ns") > pl.col("begin_ns"))
        .collect()
    )


class RepairTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds until a node is back, the mean including open outages so far.

    `low` to `high`: 90 %, of Gamma(ended + 1/2). `open`: outages without an end.
    """

    ended: int
    open: int
    mean_s: float | None
    median_s: float | None
    low_s: float | None
    high_s: float | None


def repair_time(tables: Tables) -> RepairTime:
    """Return the total time of outages that began in the window over those that ended.

    This is the maximum likelihood estimate for exponential repairs with censoring (Lawless 2003,
    3.2). Outages that end before they begin are ignored.
    """
    forwards = pl.col("until_ns").is_null() | (pl.col("until_ns") >= pl.col("t_ns"))
    began = _outages_of_window(tables).filter(forwards).select("t_ns", "until_ns").collect()
    open_ = pl.col("until_ns").is_null() | (pl.col("until_ns") > tables.until_ns)
    took = (pl.col("until_ns").clip(upper_bound=tables.until_ns) - pl.col("t_ns")) / SECOND_NS
    outages_s = began.select(
        open=open_.fill_null(value=True),
        took=took.fill_null((tables.until_ns - pl.col("t_ns")) / SECOND_NS),
    )
    done = outages_s.filter(~pl.col("open"))["took"]
    ended = len(done)
    total_s = float(outages_s["took"].sum())
    low, high = jeffreys(ended)
    return RepairTime(
        ended=ended,
        open=len(outages_s) - ended,
        mean_s=total_s / ended if ended else None,
        median_s=_median(done),
        low_s=total_s / high if ended else None,
        high_s=total_s / low if ended else None,
    )


def _outages_of_window(tables: Tables) -> pl.LazyFrame:
    inside = pl.col("t_ns").is_between(tables.since_ns, tables.until_ns, closed="left")
    return tables.outages.filter(inside)


def _median(values: pl.Series) -> float | None:
    return values.quantile(0.5, "linear")


def _over_mean(counts: pl.Series) -> float | None:
    """Return the sample variance over the mean."""
    values = counts.cast(pl.Float64).to_numpy()
    if len(values) < 2 or not values.sum():
        return None
    return float(values.var(ddof=1) / values.mean())


def _swing(rates: pl.DataFrame) -> float | None:
    values = rates["per_1000_node_days"].drop_nulls().to_numpy()
    if len(values) < 2 or not values.min():
        return None
    return float(values.max() / values.min())


def outages_as_failures(tables: Tables) -> pl.LazyFrame:
    """Return outages as failures of one certain node each, as `attribute_to_nodes` does."""
    return tables.outages.select(*NODE, "t_ns", weight=pl.lit(1.0), named=pl.lit(value=True))


def node_days_up(tables: Tables) -> pl.LazyFrame:
    """Return by node the `node_days` in the window that it existed and was not down."""
    down = (
        down_times(tables)
        .group_by(NODE)
        .agg(down=(pl.col("end_ns") - pl.col("begin_ns")).sum() / DAY_NS)
    )
    up_days = (pl.col("days") - pl.col("down").fill_null(0.0)).clip(lower_bound=0)
    return (
        node_inventory(tables)
        .join(down, on=NODE, how="left")
        .lazy()
        .select(*NODE, node_days=up_days)
    )


def part_replacements(tables: Tables, nodes: pl.DataFrame | None = None) -> pl.DataFrame:
    """Count the repairs of kind `swap` by `part`. `nodes`: of `node_inventory`.

    `swaps`, on how many `nodes`, and `per_1000_node_days` of all nodes, with both intervals
    (`confidence_intervals.with_rates`).
    """
    there = node_inventory(tables) if nodes is None else nodes
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
    rates = with_rates(
        counted.with_columns(days=pl.lit(days)), "swaps", "days", "per_1000_node_days"
    )
    return rates.with_columns(pl.col(r"^per_1000.*$") * 1000).rename({"days": "node_days"})


OUTAGE_WITHIN_S = 3600  # an outage that begins this long after a failure is attributed to it


class FailureOutcomes(NamedTuple):
    """Outcomes of the `failures` of attempts above a size.

    `wide`: outages, or findings that can end a job, took half of the job's nodes or more (two at
    least) within the window of attribution. `went_on`, of the others: no attributed node had an
    outage at the end or within OUTAGE_WITHIN_S.
    """

    failures: int
    went_on: int
    wide: int


def failure_outcomes(
    tables: Tables, found: AttributedFailures, *, above_gpus: int
) -> FailureOutcomes:
    """Count the outcomes of failures above a size.

    Meaningless for a cluster without outages: check for them first.
    """
    large = found.failures.filter(pl.col("gpus") > above_gpus)
    chosen = AttributedFailures(large, found.causes)
    wide = _wide_failures(tables, chosen)
    away = tables.outages.select(
        *NODE, begun_ns="t_ns", back_ns=pl.col("until_ns").fill_null(2**62)
    )
    after = pl.col("begun_ns") - pl.col("t_ns")
    there = (after <= OUTAGE_WITHIN_S * SECOND_NS) & (pl.col("back_ns") > pl.col("t_ns"))
    taken = (
        attribute_to_nodes(tables, worst_nodes(chosen))
        .join(away, on=NODE)
        .filter(there)
        .select(KEY)
        .unique()
        .collect()
    )
    narrow = large.select(KEY).join(wide, on=KEY, how="anti")
    return FailureOutcomes(
        failures=len(large), went_on=len(narrow.join(taken, on=KEY, how="anti")), wide=len(wide)
    )


def _wide_failures(tables: Tables, found: AttributedFailures) -> pl.DataFrame:
    """Return KEY of the failures that took half of the nodes or more."""
    near = (pl.col("begun_ns") - pl.col("t_ns")).is_between(
        -BEFORE_S * SECOND_NS, AFTER_S * SECOND_NS
    )
    failed = tables.jobs.join(found.failures.lazy().select(KEY), on=KEY, how="semi")
    away = (
        explode_hosts(failed.select(*KEY, "t_ns", "hosts"))
        .join(tables.outages.select(*NODE, begun_ns="t_ns"), on=NODE)
        .filter(near)
        .select(*KEY, "node")
    )
    broken = found.causes.lazy().filter(pl.col("severity").is_in(CAUSES)).select(*KEY, "node")
    hit = pl.concat([away, broken]).unique().group_by(KEY).agg(hit=pl.len()).collect()
    enough = (2 * pl.col("hit") >= pl.col("nodes")) & (pl.col("hit") >= 2)
    return found.failures.join(hit, on=KEY).filter(enough).select(KEY)


def survived_failures(tables: Tables, above_gpus: int) -> pl.DataFrame:
    """Return the interruptions in the window that jobs above this size survived, one row each."""
    inside = pl.col("t_ns").is_between(tables.since_ns, tables.until_ns, closed="left")
    return tables.interruptions.filter(inside, pl.col("gpus") > above_gpus).collect()


def survived_by_cause(tables: Tables) -> pl.DataFrame:
    """Count survived failures by kind of fault and rung of the recovery ladder.

    `cause`, `rung`, `failures`, `nodes` (hosts with such a failure), `lost_nodes` (failures that
    took their host), `pause_s` (mean time until every rank had committed the interrupted step).
    """
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
