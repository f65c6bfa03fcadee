"""ETTR: the published equations, the exact form, and its inverse."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import UsageError
from outlast.theory import ettr
from outlast.theory.failures import DAY_S, job_mtbf_s, preset
from outlast.theory.intervals import optimum

MINUTE_S = 60.0
LONG_S = 1e12


def mtbf_of(name: str, gpus: int) -> float:
    return job_mtbf_s(preset(name).rate_per_device_s, gpus)


def test_figures_of_the_paper() -> None:
    """16,000 GPUs of RSC-1, u0 = 5 min: 0.7 at 60 minutes, 0.93 at 5; and 100,000 GPUs at 7."""
    mtbf_s = mtbf_of("rsc-1", 16_000)
    for interval_s, says in ((3600, 0.7), (300, 0.93)):
        told = ettr.equation_1(interval_s, mtbf_s, productive_s=LONG_S, init_s=300)
        assert told == pytest.approx(says, abs=0.02)
    far = mtbf_of("rsc-1", 100_000)
    assert ettr.equation_2(7 * MINUTE_S, far, init_s=300) == pytest.approx(0.52, abs=0.005)
    assert ettr.exact(7 * MINUTE_S, far, init_s=300) == pytest.approx(0.613, abs=0.005)
    assert not ettr.in_regime(7 * MINUTE_S, far, init_s=300)


def test_a_figure_that_is_wrong() -> None:
    """RSC-2, 100,000 GPUs, 21 minutes: not 0.5 but 0.685 by equation 7, and 0.724 exactly."""
    mtbf_s = mtbf_of("rsc-2", 100_000)
    first = ettr.equation_1(21 * MINUTE_S, mtbf_s, productive_s=LONG_S, init_s=300)
    assert first == pytest.approx(0.685, abs=0.0005)
    assert ettr.exact(21 * MINUTE_S, mtbf_s, init_s=300) == pytest.approx(0.724, abs=0.0005)
    assert ettr.interval_for(0.5, mtbf_s, init_s=300) == pytest.approx(53.5 * MINUTE_S, rel=0.002)


def test_equation_1_by_hand() -> None:
    """L = 1/2000; tau 600, u0 300, q 500, R 10,000: (1 - 0.3)/(1 + (500 + 0.03 x 1100)/2000)."""
    told = ettr.equation_1(600, 2000, productive_s=1e4, init_s=300, queue_s=500)
    assert told == pytest.approx(0.7 / 1.2665)


def test_equation_7_forgets_the_first_start() -> None:
    """By algebra, equations 4 to 6 are (1 - L x)/(1 + L q + (q + u0)/R - L q tau/2R), x = u0 +
    tau/2; equation 7 has no (q + u0)/R."""
    tau, u0, q, run, rate = 600.0, 300.0, 1800.0, 20_000.0, 1 / 50_000
    x = u0 + tau / 2
    right = (1 - rate * x) / (1 + rate * q + (q + u0) / run - rate * q * tau / 2 / run)
    both = {"productive_s": run, "init_s": u0, "queue_s": q}
    assert ettr.equation_6(tau, 1 / rate, **both) == pytest.approx(right)
    assert ettr.equation_1(tau, 1 / rate, **both) > right * 1.08
    long = {**both, "productive_s": LONG_S}
    assert ettr.equation_6(tau, 1 / rate, **long) == pytest.approx(
        ettr.equation_1(tau, 1 / rate, **long), rel=1e-6
    )


@given(st.floats(0.001, 0.03), st.floats(0, 0.03), st.floats(0, 0.1))
def test_first_order_is_the_exact_form_where_failures_are_cheap(
    tau: float, u0: float, q: float
) -> None:
    """With M = 1: apart by at most the square of what a failure costs."""
    exact = ettr.exact(tau, 1.0, init_s=u0, queue_s=q)
    first = ettr.equation_1(tau, 1.0, productive_s=LONG_S, init_s=u0, queue_s=q)
    assert abs(exact - first) <= (tau + u0 + q) ** 2
    assert ettr.in_regime(tau, 1.0, init_s=u0)


def test_outside_the_regime() -> None:
    """No negative ETTR, no negative number of failures."""
    assert ettr.equation_1(1e6, 1e3, productive_s=1e6) == 0
    assert ettr.equation_2(1e6, 1e3) == 0
    assert ettr.equation_4(1e6, 1e3, productive_s=1e6) == math.inf
    assert ettr.equation_6(1e6, 1e3, productive_s=1e6) == 0
    assert ettr.exact(1e6, 1e3) == 0
    assert 0 < ettr.exact(2e3, 1e3) < 1
    assert ettr.exact(100, math.inf) == ettr.equation_2(100, math.inf) == 1
    assert ettr.in_regime(600, 1e3) and not ettr.in_regime(601, 1e3)
    assert not ettr.in_regime(600, 1e3, init_s=1)


targets = st.floats(0.05, 0.98)


@given(targets, st.floats(1, 1e6), st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0, 0.3))
def test_there_and_back(x: float, mtbf_s: float, init: float, queue: float, cost: float) -> None:
    """Where an answer is given, it has the ETTR that was asked for, and the next worse one less."""
    more = {"queue_s": queue * mtbf_s, "cost_s": cost * mtbf_s}
    start = {"init_s": init * mtbf_s}
    best_s = optimum(cost * mtbf_s, mtbf_s) or 1e-9 * mtbf_s
    if ettr.exact(best_s, mtbf_s, **more, **start) < x:
        with pytest.raises(UsageError, match="cannot be reached: the best is"):
            ettr.interval_for(x, mtbf_s, **more, **start)
        return
    interval_s = ettr.interval_for(x, mtbf_s, **more, **start)
    assert ettr.exact(interval_s, mtbf_s, **more, **start) == pytest.approx(x, rel=1e-9)
    assert ettr.exact(interval_s * 1.01, mtbf_s, **more, **start) < x
    init_s = ettr.init_for(x, interval_s, mtbf_s, **more)
    assert init_s == pytest.approx(init * mtbf_s, rel=1e-6, abs=1e-6 * mtbf_s)
    assert ettr.mtbf_for(x, interval_s, **more, **start) == pytest.approx(mtbf_s, rel=1e-6)


def test_unreachable_targets_state_the_best_value() -> None:
    with pytest.raises(UsageError, match=r"0\.99 cannot .* is 0\.904837, saving without end"):
        ettr.interval_for(0.99, 1000, init_s=100)
    with pytest.raises(UsageError, match=r"best is 0.865165, with a save every 134.8 s"):
        ettr.interval_for(0.99, 1000, cost_s=10)
    with pytest.raises(UsageError, match="with an instant start"):
        ettr.init_for(0.99, 500, 1000)
    with pytest.raises(UsageError, match=r"best is 0.909091, with no failure at all"):
        ettr.mtbf_for(0.99, 100, cost_s=10)
    with pytest.raises(UsageError, match="ettr must lie between 0 and 1"):
        ettr.interval_for(1.5, math.inf)
    with pytest.raises(UsageError, match="productive_s must be above 0"):
        ettr.equation_1(100, 1000, productive_s=0)
    assert ettr.interval_for(0.9, math.inf) == math.inf
    assert ettr.mtbf_for(0.9, 120, init_s=120) == pytest.approx(1711.7, abs=0.1)


def test_two_minutes_for_nine_tenths() -> None:
    """RSC-2, 100,000 GPUs: 0.9 with saves every 2 minutes and restarts of 2 minutes: right, 0.94
    even."""
    mtbf_s = mtbf_of("rsc-2", 100_000)
    assert ettr.exact(120, mtbf_s, init_s=120) == pytest.approx(0.941, abs=0.0005)
    assert mtbf_s == pytest.approx(DAY_S / 29.25, rel=1e-3)
