"""Failure rates: published and estimated."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import UsageError
from outlast.theory import numerics
from outlast.theory.failures import (
    DAY_S,
    HOUR_S,
    PRESETS,
    RatePrior,
    job_mtbf_s,
    posterior,
    preset,
    rate_of_daily_probability,
    rate_of_mtbf,
    rate_of_node_days,
)

# P(shape, x) by tables of chi-squared: x is half the quantile at 2 x shape degrees of freedom.
TABLE = [
    (1, 0.05, 0.05129329438755058),
    (1, 0.95, 2.995732273553991),
    (2, 0.05, 0.3553615106986621),
    (2, 0.95, 4.743864518390576),
    (10, 0.05, 5.425405697091294),
    (10, 0.95, 15.70521642211547),
]


@pytest.mark.parametrize(("shape", "probability", "x"), TABLE)
def test_quantiles_of_the_table(shape: float, probability: float, x: float) -> None:
    assert numerics.gamma_quantile(shape, probability) == pytest.approx(x, rel=1e-12)


@given(st.floats(0.1, 3e4), st.floats(0.001, 0.999))
def test_quantiles_against_the_reference(shape: float, probability: float) -> None:
    mpmath = pytest.importorskip("mpmath", reason="the reference")
    x = numerics.gamma_quantile(shape, probability)
    with mpmath.workdps(30):
        true = mpmath.gammainc(shape, 0, mpmath.mpf(x), regularized=True)
        slope = mpmath.exp(shape * mpmath.log(x) - x - mpmath.loggamma(shape))  # dP/d(log x)
        assert abs(true - probability) / slope < 1e-10


def test_quantiles_of_many_failures() -> None:
    """Close to normal: shape + 1.645 sqrt(shape) + (1.645^2 - 1)/3."""
    z = 1.6448536269514722
    x = numerics.gamma_quantile(1e6, 0.95)
    assert x == pytest.approx(1e6 + z * 1e3 + (z * z - 1) / 3, abs=1e-2)


@pytest.mark.parametrize(("shape", "probability"), [(0, 0.5), (1e9, 0.5), (math.nan, 0.5), (1, 1)])
def test_no_such_quantile(shape: float, probability: float) -> None:
    with pytest.raises(UsageError, match=r"shape must|probability must"):
        numerics.gamma_quantile(shape, probability)


def test_published_rates() -> None:
    """What the documents say of them."""
    days = {name: 1 / one.rate_per_device_s / DAY_S for name, one in PRESETS.items()}
    assert days["llama3-405b"] == pytest.approx(2111.5, abs=0.1)  # "about 2100", "50,000 h"
    assert days["rsc-1"] == pytest.approx(1230.8, abs=0.1)
    assert days["rsc-2"] == pytest.approx(3418.8, abs=0.1)
    assert days["50000-hours"] == pytest.approx(2083.3, abs=0.1)
    assert days["180-days"] == pytest.approx(180)
    assert days["half-percent-a-day"] == pytest.approx(4788.0 / 24, abs=0.01)
    assert all(one.source for one in PRESETS.values())
    assert max(days.values()) / min(days.values()) < 20


def test_mtbf_of_jobs() -> None:
    """16,384 GPUs: 3 h (Llama 3), 1.8 h (RSC-1); 131,072: 0.23 h; 2,048 of 180 days: 7594 s."""
    assert job_mtbf_s(preset("llama3-405b").rate_per_device_s, 16_384) / 3600 == pytest.approx(
        54 * 24 / 419
    )
    assert job_mtbf_s(preset("rsc-1").rate_per_device_s, 16_384) / 3600 == pytest.approx(1.80, 0.01)
    assert job_mtbf_s(preset("rsc-1").rate_per_device_s, 131_072) / 3600 == pytest.approx(
        0.23, 0.03
    )
    assert job_mtbf_s(rate_of_mtbf(180 * DAY_S), 2048) == pytest.approx(7593.75)
    assert job_mtbf_s(rate_of_daily_probability(0.005), 4096) / HOUR_S == pytest.approx(1.2, 0.03)
    failures = 4096 * rate_of_daily_probability(0.005) * 60 * DAY_S
    assert failures == pytest.approx(1231.9, abs=0.05)
    assert rate_of_node_days(6.5, 8) * 8 * 1000 * DAY_S == pytest.approx(6.5)


def test_the_prior_before_the_first_failure() -> None:
    prior = preset("llama3-405b")
    rate = posterior(prior, 0, 0)
    assert rate.mean == pytest.approx(prior.rate_per_device_s)
    assert rate.low / rate.mean == pytest.approx(0.3553615106986621 / 2)
    assert rate.high / rate.mean == pytest.approx(4.743864518390576 / 2)


def test_many_failures_outweigh_the_prior() -> None:
    true = 10 * preset("rsc-2").rate_per_device_s
    rate = posterior(preset("rsc-2"), 1000, 1000 / true)
    assert rate.low < true < rate.high
    assert rate.mean == pytest.approx(true, rel=0.02)
    assert rate.high / rate.low < 1.12


def test_few_failures_outweigh_the_prior_on_a_bad_machine() -> None:
    """Four devices, a failure a minute: 10^6 times the prior's rate. One failure may be chance."""
    prior = preset("llama3-405b")
    assert posterior(prior, 1, 4 * 60.0).mean == pytest.approx(1.5 * prior.rate_per_device_s)
    for failures in (2, 3, 100):
        rate = posterior(prior, failures, failures * 4 * 60.0)
        assert rate.mean == pytest.approx(1 / 240, rel=0.01)
        assert rate.low < 1 / 240 < rate.high
        assert rate.prior_failures < 1e-4


def test_the_prior_keeps_its_weight_where_it_fits() -> None:
    prior = preset("rsc-1")
    for failures in (0, 1, 5, 20):
        fits = posterior(prior, failures, failures / prior.rate_per_device_s)
        assert fits.prior_failures == prior.weight_failures
        assert fits.mean == pytest.approx(prior.rate_per_device_s)
    assert posterior(prior, 0, 1e12).prior_failures == prior.weight_failures


@given(
    st.integers(0, 1000), st.floats(1, 1e12), st.floats(1, 1e12), st.sampled_from(sorted(PRESETS))
)
def test_more_failures_more_more_time_less(
    failures: int, exposure: float, more: float, name: str
) -> None:
    prior = preset(name)
    rate = posterior(prior, failures, exposure)
    assert rate.low < rate.mean < rate.high
    assert posterior(prior, failures + 1, exposure).mean > rate.mean
    assert posterior(prior, failures, exposure + more).mean <= rate.mean


@pytest.mark.parametrize(
    ("failures", "exposure", "said"),
    [
        (-1, 1.0, "failures must be 0 or above"),
        (0, -1.0, "exposure_device_s must be 0 or above"),
        (0, math.nan, "exposure_device_s must be 0 or above"),
        (3, 0.0, "3 failures without any exposure"),
    ],
)
def test_impossible_experience(failures: int, exposure: float, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        posterior(preset("rsc-1"), failures, exposure)


def test_impossible_rates() -> None:
    with pytest.raises(UsageError, match="device_mtbf_s must be above 0"):
        rate_of_mtbf(0)
    with pytest.raises(UsageError, match="probability must lie between 0 and 1"):
        rate_of_daily_probability(1)
    with pytest.raises(UsageError, match="devices must be above 0"):
        job_mtbf_s(1e-9, 0)
    with pytest.raises(UsageError, match="there are llama3-405b, rsc-1"):
        preset("rsc1")
    with pytest.raises(UsageError, match="rate_per_device_s must be above 0"):
        posterior(RatePrior(name="none", rate_per_device_s=0, source=""), 0, 0)
