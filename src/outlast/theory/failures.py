"""Failure rates: published rates, posteriors of a run's own failures, and several kinds at once.

A rate is failures per device-second: failures of any component that stop a job, divided by devices
times seconds of running. Failures are taken as independent (a Poisson process), a good
approximation for a large fleet past its burn-in (Palm-Khintchine). A burst in which one cause kills
many devices counts once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from outlast.errors import UsageError
from outlast.theory import numerics
from outlast.theory.numerics import (
    broadcasts,
    check_not_negative,
    check_positive,
    check_whole,
)

HOUR_S = 3600.0
DAY_S = 86400.0
TAIL = 0.05  # on either side of a 90 % interval
WEIGHT_FAILURES = 2.0


class RatePrior(msgspec.Struct, frozen=True, kw_only=True):
    """Prior of the failure rate: Gamma distributed.

    Mean `rate_per_device_s`, shape `weight_failures`, as if that many failures had been observed.

    The default weight makes the 90 % interval 13-fold, about the span of the published rates below
    (17-fold). After two failures, the run's own data has the same weight as the prior.
    """

    name: str
    rate_per_device_s: float
    source: str
    weight_failures: float = WEIGHT_FAILURES


class RatePosterior(msgspec.Struct, frozen=True):
    """Failures per device-second: the mean, and the ends of a 90 % interval. `prior_failures`: the
    prior's weight in it."""

    mean: float
    low: float
    high: float
    prior_failures: float


@broadcasts
def rate_of_mtbf(device_mtbf_s: float) -> float:
    """Return failures per device-second of devices with this mean time between failures."""
    check_positive("device_mtbf_s", device_mtbf_s)
    return 1 / device_mtbf_s


@broadcasts
def rate_of_daily_probability(probability: float) -> float:
    """Return failures per device-second where a device fails on a given day with this probability:
    -ln(1 - p) a day. Exact for a Poisson process."""
    if not 0 < probability < 1:
        raise UsageError(f"probability must lie between 0 and 1, not {probability!r}")
    return -math.log1p(-probability) / DAY_S


@broadcasts
def rate_of_node_days(failures_per_1000: float, devices_per_node: int) -> float:
    """Return failures per device-second from failures per thousand days of a node's running."""
    check_positive("failures_per_1000", failures_per_1000)
    check_positive("devices_per_node", devices_per_node)
    return failures_per_1000 / 1000 / DAY_S / devices_per_node


@broadcasts
def job_mtbf_s(rate_per_device_s: float, devices: int) -> float:
    """Return mean seconds between failures of a job that any of its devices stops: rates add up."""
    check_positive("rate_per_device_s", rate_per_device_s)
    check_positive("devices", devices)
    return 1 / (rate_per_device_s * devices)


@broadcasts
def expected_failures(mtbf_s: float, time_s: float) -> float:
    """Return the mean number of failures in `time_s` of a job that survives each: t/M. Exact over a
    long time, also for failures that are not Poisson."""
    check_positive("mtbf_s", mtbf_s, endless=True)
    check_not_negative("time_s", time_s)
    return time_s / mtbf_s


@broadcasts
def no_failure(mtbf_s: float, time_s: float) -> float:
    """Return the probability that nothing fails for `time_s`: e^(-t/M). Exact for a Poisson
    process."""
    return math.exp(-expected_failures(mtbf_s, time_s))


def posterior(prior: RatePrior, failures: int, exposure_device_s: float) -> RatePosterior:
    """Return the rate after `failures` in `exposure_device_s` (devices x seconds of running).

    The gamma prior is conjugate to Poisson counts: shape = weight + failures, exposure = weight /
    prior rate + exposure, exact (Gelman et al., Bayesian Data Analysis, 2.6). If more failures were
    observed than the prior makes plausible, its weight is lowered (`_weight`), so that the rate of
    a bad machine rises soon. Raises UsageError for failures without exposure.
    """
    check_positive("prior.rate_per_device_s", prior.rate_per_device_s)
    check_positive("prior.weight_failures", prior.weight_failures)
    check_not_negative("failures", failures)
    check_not_negative("exposure_device_s", exposure_device_s)
    if failures and not exposure_device_s:
        raise UsageError(f"{failures} failures without any exposure: exposure_device_s is 0")
    weight = _weight(prior, failures, exposure_device_s)
    shape = weight + failures
    exposure = weight / prior.rate_per_device_s + exposure_device_s
    low = numerics.gamma_quantile(shape, TAIL)
    high = numerics.gamma_quantile(shape, 1 - TAIL)
    return RatePosterior(shape / exposure, low / exposure, high / exposure, weight)


def _weight(prior: RatePrior, failures: int, exposure_device_s: float) -> float:
    """Return the prior's own weight, or the lower one at which the observed count is as expected.

    Counts under a gamma prior of shape w vary by mu + mu^2/w around mu (negative binomial); solved
    for w, this is the moment estimate used here. One standard deviation is tolerated, so that a
    single early failure does not lower the weight.
    """
    expected = prior.rate_per_device_s * exposure_device_s
    excess = max(0.0, failures - math.sqrt(failures) - expected)
    unexplained = excess**2 - expected
    if unexplained <= 0:
        return prior.weight_failures
    return min(prior.weight_failures, expected**2 / unexplained)


def preset(name: str) -> RatePrior:
    """Return a published rate. Raises UsageError with the known names."""
    if name not in PRESETS:
        raise UsageError(f"no failure rate is called {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


PRESETS = {
    prior.name: prior
    for prior in (
        RatePrior(
            name="llama3-405b",
            rate_per_device_s=419 / (16_384 * 54 * DAY_S),
            source="419 unexpected interruptions in 54 days on 16,384 GPUs: Llama Team 2024,"
            " arXiv 2407.21783",
        ),
        RatePrior(
            name="rsc-1",
            rate_per_device_s=rate_of_node_days(6.50, 8),
            source="6.50 failures per 1000 days of a node with 8 GPUs: Kokolis et al. 2025,"
            " arXiv 2410.21680",
        ),
        RatePrior(
            name="rsc-2",
            rate_per_device_s=rate_of_node_days(2.34, 8),
            source="2.34 failures per 1000 days of a node with 8 GPUs: Kokolis et al. 2025,"
            " arXiv 2410.21680",
        ),
        RatePrior(
            name="half-percent-a-day",
            rate_per_device_s=rate_of_daily_probability(0.005),
            source="0.5 % a GPU and day: a teaching figure, not a measurement",
        ),
        RatePrior(
            name="180-days",
            rate_per_device_s=rate_of_mtbf(180 * DAY_S),
            source="180 days between failures of a GPU: a teaching figure, not a measurement",
        ),
        RatePrior(
            name="50000-hours",
            rate_per_device_s=rate_of_mtbf(50_000 * HOUR_S),
            source="50,000 h between failures of a GPU: Epoch AI 2024, rounded from Llama 3's",
        ),
    )
}


class FailureKind(msgspec.Struct, frozen=True, kw_only=True):
    """Failures with one cause: `units` components, each failing at `rate_per_unit_s`,
    independently.

    `devices_killed`: devices that one failure removes from the job until repair, counted in units
    that a spare replaces (say nodes); 0 for software failures, which leave every device usable.
    """

    name: str
    rate_per_unit_s: float
    units: int = 1
    devices_killed: int = 1

    @property
    def rate_per_s(self) -> float:
        """Failures of this kind a second. Exact: rates of independent Poisson processes add up."""
        return self.rate_per_unit_s * self.units


def rate_per_s(kinds: Sequence[FailureKind]) -> float:
    """Return failures a second of a job that each of `kinds` stops. Exact (superposition)."""
    _check_kinds(kinds)
    return math.fsum(kind.rate_per_s for kind in kinds)


def mtbf_s(kinds: Sequence[FailureKind]) -> float:
    """Return mean seconds between failures of any kind; infinity where nothing fails. Exact."""
    rate = rate_per_s(kinds)
    return 1 / rate if rate else math.inf


def kind_shares(kinds: Sequence[FailureKind]) -> dict[str, float]:
    """Return the share of failures that each kind causes, by name; they sum to 1. Exact (thinning).
    Raises UsageError where nothing fails."""
    rate = rate_per_s(kinds)
    if not rate:
        raise UsageError(f"none of {', '.join(kind.name for kind in kinds)} ever fails: no shares")
    return {kind.name: kind.rate_per_s / rate for kind in kinds}


def devices_killed_per_s(kinds: Sequence[FailureKind]) -> float:
    """Return the devices that go into repair a second: rates times devices of each kind."""
    _check_kinds(kinds)
    return math.fsum(kind.rate_per_s * kind.devices_killed for kind in kinds)


def burstiness(kinds: Sequence[FailureKind]) -> float:
    """Return variance over mean of the number of devices killed in any time: E[K^2]/E[K], 1 where
    each failure takes one. Exact for a compound Poisson process. Raises UsageError where none is.
    """
    killed = devices_killed_per_s(kinds)
    if not killed:
        raise UsageError("no kind of failure takes a device")
    return math.fsum(kind.rate_per_s * kind.devices_killed**2 for kind in kinds) / killed


def _check_kinds(kinds: Sequence[FailureKind]) -> None:
    if not kinds:
        raise UsageError("at least one kind of failure is needed")
    names = [kind.name for kind in kinds]
    for kind in kinds:
        check_not_negative(f"{kind.name}: rate_per_unit_s", kind.rate_per_unit_s)
        check_not_negative(f"{kind.name}: units", kind.units)
        check_whole(f"{kind.name}: devices_killed", kind.devices_killed)
        if names.count(kind.name) > 1:
            raise UsageError(f"two kinds of failure are named {kind.name!r}")
