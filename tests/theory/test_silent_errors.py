"""Silent errors against simulation, limiting cases, and the optimum."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import UsageError
from outlast.theory import costs, intervals


def simulated(
    work_s: float, verify_s: float, cost_s: float, restart_s: float, draw: random.Random
) -> float:
    """One segment with M = 300 s, M_s = 200 s: restarts fail as well."""
    spent = 0.0
    while True:
        fails_s = draw.expovariate(1 / 300)
        wrong = draw.expovariate(1 / 200) < work_s
        if fails_s >= work_s + verify_s + (0.0 if wrong else cost_s):
            spent += work_s + verify_s
            if not wrong:
                return spent + cost_s
        else:
            spent += fails_s
        while (again_s := draw.expovariate(1 / 300)) < restart_s:
            spent += again_s
        spent += restart_s


@pytest.mark.parametrize(
    ("work_s", "verify_s", "cost_s", "restart_s"), [(30, 3, 6, 10), (200, 50, 100, 300)]
)
def test_a_segment_as_simulated(
    work_s: float, verify_s: float, cost_s: float, restart_s: float
) -> None:
    draw = random.Random(11)
    told = [simulated(work_s, verify_s, cost_s, restart_s, draw) for _ in range(20_000)]
    mean = math.fsum(told) / len(told)
    error = math.sqrt(math.fsum((one - mean) ** 2 for one in told)) / len(told)
    exact = costs.verified_segment_s(work_s, verify_s, cost_s, 200, mtbf_s=300, restart_s=restart_s)
    assert abs(mean - exact) < 4 * error
    assert error < 0.03 * exact


def test_silent_errors_alone() -> None:
    """e^(lW)(W + V) + (e^(lW) - 1) R + C, where nothing else fails."""
    grows = math.exp(0.1)
    exact = costs.verified_segment_s(2000, 30, 60, 20_000, restart_s=120)
    assert exact == pytest.approx(grows * 2030 + (grows - 1) * 120 + 60)


@given(st.floats(1, 1e4), st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 1e3))
def test_without_silent_errors_it_is_the_segment(
    work_s: float, verify_s: float, cost_s: float, restart_s: float
) -> None:
    """A verification that finds nothing is a part of the save."""
    told = costs.verified_segment_s(
        work_s, verify_s, cost_s, math.inf, mtbf_s=1e3, restart_s=restart_s
    )
    plain = intervals.segment_s(work_s, verify_s + cost_s, 1e3, restart_s=restart_s)
    assert told == pytest.approx(plain)


@given(st.floats(0.1, 1e3), st.floats(0.1, 1e3), st.floats(0, 1e3), st.floats(1e2, 1e7))
def test_the_optimum_is_one(
    verify_s: float, cost_s: float, restart_s: float, mean_s: float
) -> None:
    """Silent errors alone: the derivative e^(lW)(l W^2 + (V + R)(l W - 1)) + R - C is 0 there."""
    best_s = costs.best_verified_interval(verify_s, cost_s, mean_s, restart_s=restart_s)
    u, more_s = best_s / mean_s, verify_s + restart_s
    left = math.exp(u) * (u * best_s + more_s * (u - 1)) + restart_s - cost_s
    slope = math.exp(u) * (u * u + 2 * u + u * more_s / mean_s)  # of it, by W
    assert abs(left / slope) < 2e-6 * best_s


def test_limits() -> None:
    assert costs.best_verified_interval(0, 10, math.inf, mtbf_s=100) == pytest.approx(
        intervals.optimum(10, 100), rel=1e-6
    )
    assert costs.best_verified_interval(1e-4, 1e-4, 1e6, mtbf_s=1e6) == pytest.approx(
        costs.first_order_verified_interval(1e-4, 1e-4, 1e6, mtbf_s=1e6), rel=1e-4
    )
    assert costs.first_order_verified_interval(30, 60, 20_000, mtbf_s=10_000) == pytest.approx(
        948.7, abs=0.05
    )
    assert costs.best_verified_interval(0, 0, 100) == 0
    assert costs.best_verified_interval(1, 0, math.inf) == math.inf
    assert costs.verified_segment_s(1e6, 1, 1, 100) == math.inf
    assert costs.verified_segment_s(10, 1, 2, math.inf) == 13


def test_impossible_input() -> None:
    with pytest.raises(UsageError, match="verify_s must be 0 or above"):
        costs.best_verified_interval(-1, 10, 100)
    with pytest.raises(UsageError, match="silent_mtbf_s must be above 0"):
        costs.verified_segment_s(10, 1, 1, 0)
