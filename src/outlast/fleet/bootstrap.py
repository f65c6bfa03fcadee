"""How sure a rate is whose failures come in groups: one job that fails again and again, one week in
which a switch is bad. A Poisson interval takes them for independent, and is too short."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from outlast.fleet.exposure import DAY_S, SECOND_NS
from outlast.fleet.intervals import TAIL
from outlast.fleet.tables import Tables

CLUSTERS = ("runs", "days")
GROUPS_MAX = 200  # clusters beyond it are thrown together by chance, which keeps them independent
DRAWS = 400


class Spread(NamedTuple):
    """The 90 % interval of failures by exposure; and `dispersion`, the variance of the count as
    clusters show it, over what Poisson failures would have: 1 where they are independent. None
    where there is no failure, or only one cluster."""

    low: float | None
    high: float | None
    dispersion: float | None


def grouped(tables: Tables, clusters: str) -> pl.Expr:
    """Which cluster an attempt of `exposure.attempts` is in, below GROUPS_MAX. `runs`: one user's
    jobs of one name, wherever and whenever they ran. `days`: all that ended in the same stretch of
    the window, of a day or more."""
    if clusters == "runs":
        return (pl.col("run") % GROUPS_MAX).cast(pl.Int64)
    window_ns = max(1, tables.until_ns - tables.since_ns)
    stretches = max(1, min(GROUPS_MAX, round(window_ns / SECOND_NS / DAY_S)))
    at = (pl.col("t_ns") - tables.since_ns).cast(pl.Float64) * stretches / window_ns
    return at.floor().clip(0, stretches - 1).cast(pl.Int64)


def spread(failures: np.ndarray, exposure: np.ndarray, *, seed: int = 0) -> Spread:
    """Of a ratio whose failures and exposure are given by cluster.

    Clusters are drawn with replacement (Efron and Tibshirani 1993, 6 and 8.6), the interval is from
    the 5 % to the 95 % quantile of the ratios. With few clusters that failed it is too short; a
    Gamma interval of failures / dispersion failures is not. Dispersion: C/(C - 1) sum (f - r x)^2
    over r sum x, with r the ratio (the sandwich estimate of a Poisson regression).
    """
    count, total, whole = len(failures), float(failures.sum()), float(exposure.sum())
    if not total or count < 2 or not whole:
        return Spread(None, None, None)
    rate = total / whole
    missed = failures - rate * exposure
    dispersion = count / (count - 1) * float(missed @ missed) / total
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), DRAWS)
    over = drawn @ exposure
    ratios = (drawn @ failures)[over > 0] / over[over > 0]
    low, high = np.quantile(ratios, [TAIL, 1 - TAIL])
    return Spread(float(low), float(high), dispersion)


def widest(spreads: dict[str, Spread]) -> tuple[str, Spread]:
    """The clusters whose dispersion is largest, with what they show."""
    return max(spreads.items(), key=lambda one: one[1].dispersion or 0.0)
