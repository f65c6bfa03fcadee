"""Several kinds of failures at once."""

from __future__ import annotations

import math

import pytest

from outlast.errors import UsageError
from outlast.theory import failures
from outlast.theory.failures import DAY_S, FailureKind, expected_failures, no_failure

FLEET = [
    FailureKind(name="gpu", rate_per_unit_s=1e-8, units=16_384),
    FailureKind(name="host", rate_per_unit_s=2e-8, units=2_048, devices_killed=8),
    FailureKind(name="rack", rate_per_unit_s=1e-8, units=128, devices_killed=128),
    FailureKind(name="software", rate_per_unit_s=1e-5, devices_killed=0),
]


def test_rates_add_up() -> None:
    rate = 16_384e-8 + 2 * 2_048e-8 + 128e-8 + 1e-5
    assert failures.rate_per_s(FLEET) == pytest.approx(rate)
    assert failures.mtbf_s(FLEET) == pytest.approx(1 / rate)
    told = failures.kind_shares(FLEET)
    assert list(told) == ["gpu", "host", "rack", "software"]
    assert told["software"] == pytest.approx(1e-5 / rate)
    assert math.fsum(told.values()) == pytest.approx(1)


def test_devices_killed_and_burstiness() -> None:
    """Variance over mean of K: racks are rare, and still most of the variance."""
    killed = 16_384e-8 + 8 * 2 * 2_048e-8 + 128 * 128e-8
    assert failures.devices_killed_per_s(FLEET) == pytest.approx(killed)
    square = 16_384e-8 + 64 * 2 * 2_048e-8 + 128**2 * 128e-8
    assert failures.burstiness(FLEET) == pytest.approx(square / killed)
    assert failures.burstiness(FLEET[:1]) == 1


def test_failures_of_a_run() -> None:
    """Seed 001's second exercise: 8,000 GPUs of 0.5 % a day, 30 days: 1,203 failures."""
    mtbf_s = DAY_S / (8000 * -math.log(0.995))
    assert expected_failures(mtbf_s, 30 * DAY_S) == pytest.approx(1203, abs=0.5)
    assert no_failure(mtbf_s, mtbf_s) == pytest.approx(1 / math.e)
    assert no_failure(math.inf, 1e9) == 1


def test_impossible_kinds() -> None:
    with pytest.raises(UsageError, match="at least one kind"):
        failures.rate_per_s([])
    with pytest.raises(UsageError, match="gpu: rate_per_unit_s must be 0 or above"):
        failures.mtbf_s([FailureKind(name="gpu", rate_per_unit_s=-1.0)])
    with pytest.raises(UsageError, match="two kinds of failure are named 'gpu'"):
        failures.mtbf_s([FLEET[0], FLEET[0]])
    with pytest.raises(UsageError, match="none of gpu ever fails"):
        failures.kind_shares([FailureKind(name="gpu", rate_per_unit_s=0.0)])
    with pytest.raises(UsageError, match="no kind of failure takes a device"):
        failures.burstiness(FLEET[3:])
    assert failures.mtbf_s([FailureKind(name="gpu", rate_per_unit_s=0.0)]) == math.inf
