"""Confidence intervals of counted rates: Poisson, and bootstrapped by cluster.

The Poisson intervals assume independent failures; the bootstrap resamples whole clusters of jobs.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import polars as pl

from outlast.fleet.analysis.exposure import DAY_S, SECOND_NS
from outlast.fleet.record_tables import Tables
from outlast.theory import numerics

TAIL = 0.05  # on either side of a 90 % interval
Z_90 = 1.6448536269514722  # of a normal distribution
CONVENTION = "Gamma(failures + 1/2, exposure), Jeffreys' posterior of a Poisson rate"


@lru_cache(maxsize=65_536)
def jeffreys(failures: float) -> tuple[float, float]:
    """Return the 90 % interval of the expected number of failures, by Jeffreys' prior.

    The 5 % and 95 % quantiles of Gamma(failures + 1/2, 1). Averaged over rates the coverage is 90 %
    within some points, from about three failures on (Brown, Cai and DasGupta 2003).
    """
    return numerics.gamma_quantile(failures + 0.5, TAIL), numerics.gamma_quantile(
        failures + 0.5, 1 - TAIL
    )


@lru_cache(maxsize=65_536)
def garwood(failures: float) -> tuple[float, float]:
    """Return the exact 90 % interval of the expected number of failures.

    From the 5 % quantile of Gamma(failures, 1) to the 95 % quantile of Gamma(failures + 1, 1). Its
    coverage is at least 90 % (Garwood 1936).
    """
    low = numerics.gamma_quantile(failures, TAIL) if failures else 0.0
    return low, numerics.gamma_quantile(failures + 1, 1 - TAIL)


def with_rates(frame: pl.DataFrame, failures: str, exposure: str, name: str) -> pl.DataFrame:
    """Add failures per exposure as `name`, with its intervals; null without exposure.

    Columns: `name`_low and `name`_high by Gamma (CONVENTION), `name`_exact_low and
    `name`_exact_high by Garwood.
    """
    counts = frame[failures].to_list()
    over = pl.when(pl.col(exposure) > 0).then(pl.col(exposure))
    ends = {
        f"{name}_low": [jeffreys(each)[0] for each in counts],
        f"{name}_high": [jeffreys(each)[1] for each in counts],
        f"{name}_exact_low": [garwood(each)[0] for each in counts],
        f"{name}_exact_high": [garwood(each)[1] for each in counts],
    }
    return frame.with_columns(
        (pl.col(failures) / over).alias(name),
        *(pl.Series(end, values, pl.Float64) / over for end, values in ends.items()),
    )


class ShareEstimate(NamedTuple):
    """Estimate of a share, with Wilson's 90 % interval.

    `value` is Jeffreys' posterior mean (count + 1/2) / (of + 1), which is never 0 or 1.
    """

    value: float
    low: float
    high: float


def estimate_share(count: int, of: int) -> ShareEstimate:
    """Estimate the share of `count` among `of` > 0 independent trials.

    Wilson 1927; Brown, Cai and DasGupta 2001 compare intervals.
    """
    share = count / of
    square = Z_90**2 / of
    middle = (share + square / 2) / (1 + square)
    half = Z_90 / (1 + square) * math.sqrt(share * (1 - share) / of + square / 4 / of)
    return ShareEstimate((count + 0.5) / (of + 1), max(0.0, middle - half), min(1.0, middle + half))


CLUSTERS = ("runs", "days")
GROUPS_MAX = 200  # more clusters are merged at random, which keeps them independent
DRAWS = 400


class BootstrapInterval(NamedTuple):
    """90 % interval of failures per exposure, and the dispersion of the count.

    `dispersion`: variance of the count between clusters over that of Poisson failures, 1 if they
    are independent. All None without a failure or with a single cluster.
    """

    low: float | None
    high: float | None
    dispersion: float | None


def cluster_of_attempt(tables: Tables, clusters: str) -> pl.Expr:
    """Return the cluster number, below GROUPS_MAX, of each attempt of `exposure.attempts`.

    `runs`: one user's jobs of one name, at any time and place. `days`: all that ended in the same
    stretch of the window, of a day or more.
    """
    if clusters == "runs":
        return (pl.col("run") % GROUPS_MAX).cast(pl.Int64)
    window_ns = max(1, tables.until_ns - tables.since_ns)
    stretches = max(1, min(GROUPS_MAX, round(window_ns / SECOND_NS / DAY_S)))
    at = (pl.col("t_ns") - tables.since_ns).cast(pl.Float64) * stretches / window_ns
    return at.floor().clip(0, stretches - 1).cast(pl.Int64)


def bootstrap_interval(
    failures: np.ndarray, exposure: np.ndarray, *, seed: int = 0
) -> BootstrapInterval:
    """Return the interval of a ratio of failures to exposure, both given by cluster.

    Clusters are drawn with replacement (Efron and Tibshirani 1993, 6 and 8.6); the interval is from
    the 5 % to the 95 % quantile of the ratios. With few failing clusters it is too short; a Gamma
    interval of failures / dispersion failures is not. Dispersion: C/(C - 1) sum (f - r x)^2 over r
    sum x, with r the ratio (the sandwich estimate of a Poisson regression).
    """
    count = len(failures)
    total = float(failures.sum())
    total_exposure = float(exposure.sum())
    if not total or count < 2 or not total_exposure:
        return BootstrapInterval(None, None, None)
    rate = total / total_exposure
    missed = failures - rate * exposure
    dispersion = count / (count - 1) * float(missed @ missed) / total
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), DRAWS)
    over = drawn @ exposure
    ratios = (drawn @ failures)[over > 0] / over[over > 0]
    low, high = np.quantile(ratios, [TAIL, 1 - TAIL])
    return BootstrapInterval(float(low), float(high), dispersion)


def widest_interval(spreads: dict[str, BootstrapInterval]) -> tuple[str, BootstrapInterval]:
    """Return the kind of clusters with the largest dispersion, and its interval."""
    return max(spreads.items(), key=lambda spread: spread[1].dispersion or 0.0)
