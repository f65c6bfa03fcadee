"""Failure rates of infrastructure by cause and over time, and MTTF by job size."""

from __future__ import annotations

import msgspec
import polars as pl

from outlast.fleet.analysis.confidence_intervals import (
    CLUSTERS,
    BootstrapInterval,
    bootstrap_interval,
    cluster_of_attempt,
    garwood,
    jeffreys,
    widest_interval,
    with_rates,
)
from outlast.fleet.analysis.exposure import (
    KEY,
    LARGE_GPUS,
    gpus_per_node,
    has_gpus,
    in_whole_nodes,
    job_node_days,
    on_gpus,
    per_1000,
    whole_days,
)
from outlast.fleet.analysis.failure_attribution import (
    AttributedFailures,
    CauseGrouping,
    label_failures,
)
from outlast.fleet.record_tables import DAY_NS, Tables

ROLLING_DAYS = 30
ALL = "all"


def rates_by_cause(
    tables: Tables, found: AttributedFailures, by: CauseGrouping = "symptom"
) -> pl.DataFrame:
    """Return failures per GPU-hour of all jobs, by cause.

    `failures` that have the cause, `share` of all failures (one with two causes counts half for
    each), `per_gpu_hour` with both intervals (`confidence_intervals.with_rates`). Row ALL: each
    failure once, whatever its causes.
    """
    gpu_hours = on_gpus(tables).select(pl.col("gpu_hours").sum()).collect().item()
    causes = label_failures(found, by).filter(pl.col("gpus") > 0)
    counted = (
        causes.group_by("cause")
        .agg(failures=pl.len().cast(pl.Int64), share=pl.col("share").sum())
        .sort(["failures", "cause"], descending=[True, False])
    )
    failed = found.failures.filter(pl.col("gpus") > 0).height
    total = pl.DataFrame({"cause": [ALL], "failures": [failed], "share": [float(failed)]})
    rows = pl.concat([counted, total]).with_columns(
        share=pl.col("share") / max(1, failed), gpu_hours=pl.lit(float(gpu_hours))
    )
    return with_rates(rows, "failures", "gpu_hours", "per_gpu_hour")


def rolling_rates(
    tables: Tables,
    found: AttributedFailures,
    by: CauseGrouping = "symptom",
    *,
    days: int = ROLLING_DAYS,
) -> pl.DataFrame:
    """Return failures per 1000 node-days in the `days` up to each day, by cause and for ALL.

    Of jobs on GPUs, or of all jobs if none had one. Columns: `day` (a date), `cause`, `failures`,
    `node_days`, `per_1000_node_days`. The first row is the first complete stretch: shorter ones
    would swing more.
    """
    calendar = whole_days(job_node_days(tables), tables)
    ours = pl.col("gpus") > 0 if has_gpus(tables) else pl.lit(value=True)
    causes = label_failures(found, by).filter(ours).select("cause", day=pl.col("t_ns") // DAY_NS)
    failures = found.failures.filter(ours)
    total = failures.select(cause=pl.lit(ALL), day=pl.col("t_ns") // DAY_NS)
    counts = pl.concat([causes, total]).group_by("cause", "day").agg(failures=pl.len())
    names = pl.concat([counts.select("cause").unique(), pl.DataFrame({"cause": [ALL]})]).unique()
    return (
        calendar.join(names, how="cross")
        .join(counts, on=["cause", "day"], how="left")
        .sort("cause", "day")
        .with_columns(pl.col("failures").fill_null(0).cast(pl.Int64))
        .with_columns(
            pl.col("failures", "node_days").rolling_sum(days, min_samples=days).over("cause")
        )
        .drop_nulls("failures")
        .select(
            pl.col("day").cast(pl.Int32).cast(pl.Date),
            "cause",
            "failures",
            "node_days",
            per_1000_node_days=per_1000("failures", "node_days"),
        )
    )


def rates_of_new_checks(
    tables: Tables, found: AttributedFailures, *, days: int = ROLLING_DAYS
) -> pl.DataFrame:
    """Return the failure rates before and after each new check.

    `check`, `symptom`, its `day`, and failures with that symptom per 1000 node-days in the `days`
    before (`before`) and after (`after`), with counts. Days outside of the window are ignored, and
    so are checks from before it.
    """
    calendar = job_node_days(tables)
    ours = pl.col("gpus") > 0 if has_gpus(tables) else pl.lit(value=True)
    causes = label_failures(found).filter(ours).select("cause", day=pl.col("t_ns") // DAY_NS)
    rows = [
        {"check": check, "symptom": symptom, "day": at_ns // DAY_NS}
        | _rates_around("before", symptom, at_ns // DAY_NS - days, days, calendar, causes)
        | _rates_around("after", symptom, at_ns // DAY_NS, days, calendar, causes)
        for check, symptom, at_ns in tables.checks.filter(
            pl.col("t_ns").is_between(tables.since_ns, tables.until_ns, closed="left")
        )
        .sort("t_ns", "check")
        .select("check", pl.col("symptom").cast(pl.String), "t_ns")
        .collect()
        .iter_rows()
    ]
    schema = {
        "check": pl.String,
        "symptom": pl.String,
        "day": pl.Int32,
        "before": pl.Float64,
        "before_failures": pl.Int64,
        "after": pl.Float64,
        "after_failures": pl.Int64,
    }
    return pl.DataFrame(rows, schema=schema).with_columns(pl.col("day").cast(pl.Date))


def swing(rates: pl.DataFrame) -> float | None:
    """Return the highest over the lowest rolling rate of ALL; None if one is 0 or none exists."""
    daily = rates.filter(pl.col("cause") == ALL)["per_1000_node_days"].drop_nulls()
    if not len(daily) or not daily.min():
        return None
    return float(daily.to_numpy().max() / daily.to_numpy().min())


def _rates_around(
    name: str, symptom: str, first: int, days: int, calendar: pl.DataFrame, causes: pl.DataFrame
) -> dict[str, float | int | None]:
    inside = pl.col("day").is_between(first, first + days - 1)
    node_days = float(calendar.filter(inside)["node_days"].sum())
    count = causes.filter(inside, pl.col("cause") == symptom).height
    return {name: 1000 * count / node_days if node_days else None, f"{name}_failures": count}


class FailureRate(msgspec.Struct, frozen=True, kw_only=True):
    """r_f: failures per 1000 node-days of jobs with more than `above_gpus` GPUs.

    `low` to `high`: 90 %, of Gamma(failures + 1/2, node_days), for independent failures; `boot_`:
    by resampling `clusters`, those with the larger dispersion. `sure_as`: failures over the
    dispersion above 1, the number of independent failures with the same certainty.
    """

    above_gpus: int
    attempts: int
    failures: int
    node_days: float
    gpu_days: float
    per_1000_node_days: float | None
    low: float | None
    high: float | None
    boot_low: float | None
    boot_high: float | None
    clusters: str
    dispersion: float | None
    sure_as: float


def failure_rate(
    tables: Tables, found: AttributedFailures, *, above_gpus: int = LARGE_GPUS
) -> FailureRate:
    """Return r_f = failures / sum of (nodes x runtime in days) over all attempts above a size.

    Failed boots do not count: these attempts had not begun.
    """
    return _rate(_count_by_size(tables, found, pl.lit(0), above_gpus), above_gpus)


def _rate(counted: dict[str, pl.DataFrame], above_gpus: int) -> FailureRate:
    ours = {name: _sum_by(frame.filter("large"), name) for name, frame in counted.items()}
    large = ours["runs"]
    failures = int(large["failures"].sum())
    node_days = float(large["node_days"].sum())
    clusters, interval = widest_interval(
        {name: _bootstrap(frame, "node_days") for name, frame in ours.items()}
    )
    per = 1000 / node_days if node_days else None
    ends = jeffreys(failures)
    return FailureRate(
        above_gpus=above_gpus,
        attempts=int(large["attempts"].sum()),
        failures=failures,
        node_days=node_days,
        gpu_days=float(large["gpu_hours"].sum()) / 24,
        per_1000_node_days=per and failures * per,
        low=per and ends[0] * per,
        high=per and ends[1] * per,
        boot_low=interval.low and interval.low * 1000,
        boot_high=interval.high and interval.high * 1000,
        clusters=clusters,
        dispersion=interval.dispersion,
        sure_as=failures / max(1.0, interval.dispersion or 1.0),
    )


def mttf(
    tables: Tables,
    found: AttributedFailures,
    *,
    above_gpus: int = LARGE_GPUS,
    node_gpus: int | None = None,
) -> pl.DataFrame:
    """Return the MTTF by job size, in GPUs rounded up to the next multiple of a node's.

    `attempts`, `failures`, `hours` that they ran, and `mttf_h` = hours / failures (null without a
    failure).

    - `low_h` to `high_h`: 90 %, hours over the quantiles of Gamma(failures + 1/2, 1), as r_f's.
    Without a failure there is no upper end, and MTTF is above `low_h` with 95 %: hours / 3.0,
    exact.

    - `boot_low_h`, `boot_high_h`, `dispersion`, `clusters`: as in FailureRate.

    - `projected_h`, with the ends of r_f's own interval: 24 / (nodes x r_f), nodes = size / the
    GPUs per node of r_f's jobs: the MTTF if failures depended on size alone.

    `node_gpus`: GPUs per node for the sizes; by default `exposure.gpus_per_node`.
    """
    size = in_whole_nodes(pl.col("gpus"), node_gpus or gpus_per_node(tables).gpus)
    counted = _count_by_size(tables, found, size, above_gpus)
    intervals = {
        clusters: {
            key[0]: _bootstrap(frame, "hours")
            for key, frame in _sum_by(by, "size", clusters).group_by("size", maintain_order=True)
        }
        for clusters, by in counted.items()
    }
    sums = _sum_by(counted["runs"], "size").drop("node_days")
    chosen = [
        widest_interval({name: intervals[name][size] for name in CLUSTERS}) for size in sums["size"]
    ]
    ends = [jeffreys(each) if each else garwood(0) for each in sums["failures"]]
    hours = pl.col("hours")
    failed = pl.col("failures") > 0
    large = _rate(counted, above_gpus)
    of_a_node = large.gpu_days / large.node_days if large.node_days else 0.0
    rates = (large.per_1000_node_days, large.high, large.low)
    names = ("projected_h", "projected_low_h", "projected_high_h")
    return sums.rename({"size": "gpus"}).with_columns(
        mttf_h=pl.when(failed).then(hours / pl.col("failures")),
        low_h=hours / pl.Series([high for _, high in ends], dtype=pl.Float64),
        high_h=pl.when(failed).then(hours / pl.Series([low for low, _ in ends], dtype=pl.Float64)),
        boot_low_h=_inverse([interval.high for _, interval in chosen]),
        boot_high_h=_inverse([interval.low for _, interval in chosen]),
        dispersion=pl.Series([interval.dispersion for _, interval in chosen], dtype=pl.Float64),
        clusters=pl.Series([name for name, _ in chosen], dtype=pl.String),
        **{
            name: 24_000 * of_a_node / pl.col("gpus") / (rate or None)
            for name, rate in zip(names, rates, strict=True)
        },
    )


def _count_by_size(
    tables: Tables, found: AttributedFailures, size: pl.Expr, above_gpus: int
) -> dict[str, pl.DataFrame]:
    """Count attempts, failures and running time by size, for each kind of clusters.

    Keys: size, whether it is above `above_gpus`, and the cluster.
    """
    ran = found.failures.lazy().filter(pl.col("state") != "BOOT_FAIL")
    failed = ran.select(KEY).with_columns(failed=pl.lit(value=True))
    attempts = (
        on_gpus(tables)
        .select(
            *KEY,
            "ended",
            "ran_s",
            "node_days",
            "gpu_hours",
            size=size,
            large=pl.col("gpus") > above_gpus,
            **{name: cluster_of_attempt(tables, name) for name in CLUSTERS},
        )
        .join(failed, on=KEY, how="left")
        .group_by("size", "large", *CLUSTERS)
        .agg(
            attempts=pl.len().cast(pl.Int64),
            failures=(pl.col("failed") & pl.col("ended")).sum().cast(pl.Int64),
            hours=pl.col("ran_s").sum() / 3600,
            node_days=pl.col("node_days").sum(),
            gpu_hours=pl.col("gpu_hours").sum(),
        )
        .collect()
    )
    return {name: _sum_by(attempts, "size", "large", name) for name in CLUSTERS}


def _sum_by(frame: pl.DataFrame, *by: str) -> pl.DataFrame:
    """Return sums by group, sorted so that resampling is reproducible."""
    sums = pl.col("attempts", "failures", "hours", "node_days", "gpu_hours").sum()
    return frame.group_by(by).agg(sums).sort(by)


def _bootstrap(frame: pl.DataFrame, exposure: str) -> BootstrapInterval:
    return bootstrap_interval(
        frame["failures"].to_numpy().astype(float), frame[exposure].to_numpy()
    )


def _inverse(values: list[float | None]) -> pl.Series:
    return pl.Series([1 / each if each else None for each in values], dtype=pl.Float64)
