"""How often infrastructure fails, by cause: over all of the window, and as it changes (Kokolis et
al. 2025, III, Fig. 4 and 5)."""

from __future__ import annotations

import polars as pl

from outlast.fleet.attribution import Attributed, By, labelled
from outlast.fleet.daily import jobs_by_day, per_1000, whole_days
from outlast.fleet.exposure import has_gpus, on_gpus
from outlast.fleet.intervals import with_rates
from outlast.fleet.tables import DAY_NS, Tables

ROLLING_DAYS = 30
ALL = "all"


def by_cause(tables: Tables, found: Attributed, by: By = "symptom") -> pl.DataFrame:
    """Failures per GPU-hour of all jobs, by cause: `failures` that have it, `share` of all failures
    (one with two causes counts half for each), `per_gpu_hour` with both intervals
    (`intervals.with_rates`). Row ALL: each failure once, whatever its causes."""
    gpu_hours = on_gpus(tables).select(pl.col("gpu_hours").sum()).collect().item()
    causes = labelled(found, by).filter(pl.col("gpus") > 0)
    counted = (
        causes.group_by("cause")
        .agg(failures=pl.len().cast(pl.Int64), share=pl.col("share").sum())
        .sort(["failures", "cause"], descending=[True, False])
    )
    failed = found.failures.filter(pl.col("gpus") > 0).height
    whole = pl.DataFrame({"cause": [ALL], "failures": [failed], "share": [float(failed)]})
    told = pl.concat([counted, whole]).with_columns(
        share=pl.col("share") / max(1, failed), gpu_hours=pl.lit(float(gpu_hours))
    )
    return with_rates(told, "failures", "gpu_hours", "per_gpu_hour")


def rolling(
    tables: Tables, found: Attributed, by: By = "symptom", *, days: int = ROLLING_DAYS
) -> pl.DataFrame:
    """Failures per 1000 node-days of jobs on GPUs (of all jobs, where none had one) in the `days`
    up to and with each day, by cause and for ALL: `day` (a date), `cause`, `failures`,
    `node_days`, `per_1000_node_days`. Whole days only, and the first whole stretch is the first
    row: a rate of less time would swing more."""
    calendar = whole_days(jobs_by_day(tables), tables)
    ours = pl.col("gpus") > 0 if has_gpus(tables) else pl.lit(value=True)
    causes = labelled(found, by).filter(ours).select("cause", day=pl.col("t_ns") // DAY_NS)
    failures = found.failures.filter(ours)
    whole = failures.select(cause=pl.lit(ALL), day=pl.col("t_ns") // DAY_NS)
    counts = pl.concat([causes, whole]).group_by("cause", "day").agg(failures=pl.len())
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


def introduced(tables: Tables, found: Attributed, *, days: int = ROLLING_DAYS) -> pl.DataFrame:
    """What each new check made visible: `check`, `symptom`, its `day`, and failures with that
    symptom per 1000 node-days in the `days` before (`before`) and after (`after`), with counts.
    Days outside of the window count for nothing; a check that was there before it is left out."""
    calendar = jobs_by_day(tables)
    ours = pl.col("gpus") > 0 if has_gpus(tables) else pl.lit(value=True)
    causes = labelled(found).filter(ours).select("cause", day=pl.col("t_ns") // DAY_NS)
    rows = [
        {"check": check, "symptom": symptom, "day": at_ns // DAY_NS}
        | _around("before", symptom, at_ns // DAY_NS - days, days, calendar, causes)
        | _around("after", symptom, at_ns // DAY_NS, days, calendar, causes)
        for check, symptom, at_ns in tables.checks.filter(
            pl.col("t_ns").is_between(tables.since_ns, tables.until_ns, closed="left")
        )
        .sort("t_ns", "check")
        .select("check", pl.col("symptom").cast(pl.String), "t_ns")
        .collect()
        .iter_rows()
    ]
    schema = {
        "check": pl.String, "symptom": pl.String, "day": pl.Int32, "before": pl.Float64,
        "before_failures": pl.Int64, "after": pl.Float64, "after_failures": pl.Int64,
    }  # fmt: skip
    return pl.DataFrame(rows, schema=schema).with_columns(pl.col("day").cast(pl.Date))


def swing(rates: pl.DataFrame) -> float | None:
    """How many times the lowest rolling rate the highest is, of ALL; None where one is 0 or there
    is none."""
    found = rates.filter(pl.col("cause") == ALL)["per_1000_node_days"].drop_nulls()
    if not len(found) or not found.min():
        return None
    return float(found.to_numpy().max() / found.to_numpy().min())


def _around(
    name: str, symptom: str, first: int, days: int, calendar: pl.DataFrame, causes: pl.DataFrame
) -> dict[str, float | int | None]:
    inside = pl.col("day").is_between(first, first + days - 1)
    held = float(calendar.filter(inside)["node_days"].sum())
    count = causes.filter(inside, pl.col("cause") == symptom).height
    return {name: 1000 * count / held if held else None, f"{name}_failures": count}
