"""How long jobs of a size run until infrastructure ends them (Kokolis et al. 2025, III, Fig. 7)."""

from __future__ import annotations

import msgspec
import polars as pl

from outlast.fleet.attribution import Attributed
from outlast.fleet.bootstrap import CLUSTERS, Spread, grouped, spread, widest
from outlast.fleet.exposure import KEY, gpus_per_node, in_whole_nodes, on_gpus
from outlast.fleet.intervals import garwood, jeffreys
from outlast.fleet.tables import Tables

LARGE_GPUS = 128  # r_f is that of jobs above


class FailureRate(msgspec.Struct, frozen=True, kw_only=True):
    """r_f: failures in 1000 days of a node's running, of jobs with more than `above_gpus` GPUs.

    `low` to `high`: 90 %, of Gamma(failures + 1/2, node_days), for independent failures; `boot_`:
    by drawing `clusters` anew, the ones that show more dispersion. `sure_as`: failures over
    dispersion, where that is above 1: as many independent failures would tell as much.
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


def failure_rate(tables: Tables, found: Attributed, *, above_gpus: int = LARGE_GPUS) -> FailureRate:
    """r_f = failures / sum of (nodes x runtime in days), over all attempts with more than
    `above_gpus` GPUs. A boot that failed is none of theirs: they had not begun."""
    return _rate(_counted(tables, found, pl.lit(0), above_gpus), above_gpus)


def _rate(counted: dict[str, pl.DataFrame], above_gpus: int) -> FailureRate:
    ours = {name: _summed(frame.filter("large"), name) for name, frame in counted.items()}
    large = ours["runs"]
    failures, node_days = int(large["failures"].sum()), float(large["node_days"].sum())
    clusters, told = widest({name: _spread(frame, "node_days") for name, frame in ours.items()})
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
        boot_low=told.low and told.low * 1000,
        boot_high=told.high and told.high * 1000,
        clusters=clusters,
        dispersion=told.dispersion,
        sure_as=failures / max(1.0, told.dispersion or 1.0),
    )


def mttf(
    tables: Tables, found: Attributed, *, above_gpus: int = LARGE_GPUS, node_gpus: int | None = None
) -> pl.DataFrame:
    """For each size, in GPUs rounded up to the next multiple of a node's: `attempts`, `failures`,
    `hours` that they ran, and `mttf_h` = hours / failures (null where none failed).

    - `low_h` to `high_h`: 90 %, hours over the quantiles of Gamma(failures + 1/2, 1), as r_f's.
      Without a failure there is no upper end, and MTTF is above `low_h` with 95 %: hours / 3.0,
      exact.
    - `boot_low_h`, `boot_high_h`, `dispersion`, `clusters`: as in FailureRate.
    - `projected_h`, with the ends of r_f's own interval: 24 / (nodes x r_f), nodes = size / the
      GPUs that r_f's jobs held of a node: what MTTF would be if failures were a matter of size
      alone.

    `node_gpus`: of a node, for the sizes; by default `exposure.gpus_per_node`.
    """
    size = in_whole_nodes(pl.col("gpus"), node_gpus or gpus_per_node(tables).gpus)
    counted = _counted(tables, found, size, above_gpus)
    told = {
        clusters: {
            key[0]: _spread(frame, "hours")
            for key, frame in _summed(by, "size", clusters).group_by("size", maintain_order=True)
        }
        for clusters, by in counted.items()
    }
    sums = _summed(counted["runs"], "size").drop("node_days")
    chosen = [widest({name: told[name][size] for name in CLUSTERS}) for size in sums["size"]]
    ends = [jeffreys(each) if each else garwood(0) for each in sums["failures"]]
    hours, failed = pl.col("hours"), pl.col("failures") > 0
    large = _rate(counted, above_gpus)
    of_a_node = large.gpu_days / large.node_days if large.node_days else 0.0
    rates = (large.per_1000_node_days, large.high, large.low)
    names = ("projected_h", "projected_low_h", "projected_high_h")
    return sums.rename({"size": "gpus"}).with_columns(
        mttf_h=pl.when(failed).then(hours / pl.col("failures")),
        low_h=hours / pl.Series([high for _, high in ends], dtype=pl.Float64),
        high_h=pl.when(failed).then(hours / pl.Series([low for low, _ in ends], dtype=pl.Float64)),
        boot_low_h=_inverse([one.high for _, one in chosen]),
        boot_high_h=_inverse([one.low for _, one in chosen]),
        dispersion=pl.Series([one.dispersion for _, one in chosen], dtype=pl.Float64),
        clusters=pl.Series([name for name, _ in chosen], dtype=pl.String),
        **{
            name: 24_000 * of_a_node / pl.col("gpus") / (rate or None)
            for name, rate in zip(names, rates, strict=True)
        },
    )


def _counted(
    tables: Tables, found: Attributed, size: pl.Expr, above_gpus: int
) -> dict[str, pl.DataFrame]:
    """By size, whether it is above `above_gpus`, and cluster, for each sort of clusters: attempts,
    failures, and what they ran."""
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
            **{name: grouped(tables, name) for name in CLUSTERS},
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
    return {name: _summed(attempts, "size", "large", name) for name in CLUSTERS}


def _summed(frame: pl.DataFrame, *by: str) -> pl.DataFrame:
    """Sorted, so that what is drawn by chance is drawn alike."""
    sums = pl.col("attempts", "failures", "hours", "node_days", "gpu_hours").sum()
    return frame.group_by(by).agg(sums).sort(by)


def _spread(frame: pl.DataFrame, exposure: str) -> Spread:
    return spread(frame["failures"].to_numpy().astype(float), frame[exposure].to_numpy())


def _inverse(values: list[float | None]) -> pl.Series:
    return pl.Series([1 / each if each else None for each in values], dtype=pl.Float64)
