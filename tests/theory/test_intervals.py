"""Save intervals against simulation, each other, and published figures."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import UsageError
from outlast.theory import intervals

costs = st.floats(1e-3, 1e4)
mtbfs = st.floats(1.0, 1e9)
ratios = st.floats(1e-6, 3.0)


def simulated(
    work_s: float, mtbf_s: float, restart_s: float, down_s: float, draw: random.Random
) -> float:
    """One segment, told: work until it is done, after each failure downtime and a restart that can
    fail as well."""
    spent = 0.0
    while (failure := draw.expovariate(1 / mtbf_s)) < work_s:
        spent += failure + down_s
        while (failure := draw.expovariate(1 / mtbf_s)) < restart_s:
            spent += failure + down_s
        spent += restart_s
    return spent + work_s


@pytest.mark.parametrize(
    ("interval_s", "cost_s", "restart_s", "down_s"),
    [(30, 2, 5, 3), (50, 10, 60, 0), (100, 100, 100, 20), (5, 0, 0, 0)],
)
def test_a_segment_as_simulated(
    interval_s: float, cost_s: float, restart_s: float, down_s: float
) -> None:
    """M = 100 s, from much longer than everything to equal to it: |z| < 4."""
    draw = random.Random(20_240_731)
    told = [simulated(interval_s + cost_s, 100, restart_s, down_s, draw) for _ in range(60_000)]
    mean = math.fsum(told) / len(told)
    error = math.sqrt(math.fsum((one - mean) ** 2 for one in told)) / len(told)
    exact = intervals.segment_s(interval_s, cost_s, 100, restart_s=restart_s, down_s=down_s)
    assert abs(mean - exact) < 4 * error
    assert error < 0.02 * exact  # else nothing would be told apart


def test_a_safe_restart_as_simulated() -> None:
    """A restart in which nothing fails is downtime; saves in which nothing fails only add."""
    draw = random.Random(7)
    told = [simulated(60, 100, 0, 25 + 5, draw) for _ in range(60_000)]
    mean = math.fsum(told) / len(told)
    error = math.sqrt(math.fsum((one - mean) ** 2 for one in told)) / len(told)
    exact = intervals.segment_safe_restart_s(50, 10, 100, restart_s=25, down_s=5)
    assert abs(mean - exact) < 4 * error
    assert intervals.segment_safe_saves_s(50, 10, 100) == pytest.approx(
        intervals.segment_s(50, 0, 100) + 10
    )


@pytest.mark.parametrize(
    ("interval_s", "flush_s", "drag"),
    [(30, 25, 0.0), (100, 100, 0.0), (40, 20, 0.5), (90, 90, 1.0)],
)
def test_a_flush_as_simulated(interval_s: float, flush_s: float, drag: float) -> None:
    """A life ends at each failure, and leaves as many saves as were durable by then; M = 100 s. The
    first interval of a life has no flush beside it. The form with F is exact, not first order."""
    draw = random.Random(3)
    first_s = interval_s + 4
    saves: list[int] = []
    for _ in range(40_000):
        rest_s = draw.expovariate(1 / 100) - first_s - flush_s
        saves.append(0 if rest_s < 0 else 1 + int(rest_s // (first_s + drag * flush_s)))
    mean = sum(saves) / len(saves)
    error = math.sqrt(sum((one - mean) ** 2 for one in saves)) / len(saves)
    more = {"flush_s": flush_s, "drag": drag, "restart_s": 12, "down_s": 5}
    life_s = 100 + intervals.recovery_s(12, 100, down_s=5)
    exact = intervals.segment_s(interval_s, 4, 100, **more)
    assert abs(mean - life_s / exact) < 4 * error
    assert error < 0.02 * mean
    first_order = intervals.waste(interval_s, 4, 100, **more)
    assert intervals.efficiency(interval_s, 4, 100, **more) > 1 - first_order


def test_recovering() -> None:
    """A restart in which failures strike: it is what `segment_s` adds to each failure."""
    draw = random.Random(5)
    told = []
    for _ in range(20_000):
        spent_s = 20.0
        while (failure_s := draw.expovariate(1 / 100)) < 60:
            spent_s += failure_s + 20
        told.append(spent_s + 60)
    mean = math.fsum(told) / len(told)
    error = math.sqrt(math.fsum((one - mean) ** 2 for one in told)) / len(told)
    assert abs(mean - intervals.recovery_s(60, 100, down_s=20)) < 4 * error
    assert intervals.recovery_s(60, math.inf, down_s=20) == 80
    assert intervals.recovery_s(60, 1e12, down_s=20) == pytest.approx(80)
    assert intervals.recovery_s(1e6, 1) == math.inf


def test_the_walkthrough_of_2048_gpus() -> None:
    """180 days a GPU, 2,048 of them, C = 120 s: 22.5 min and 17.8 % by first order; and the table
    of intervals, whose last row (4 h) first order puts at 95.65 % and the exact form at 67.1 %."""
    mtbf_s = 180 * 86400 / 2048
    assert intervals.young(120, mtbf_s) == pytest.approx(1350)
    said = {300: 0.420, 900: 0.192, 1350: 0.178, 3600: 0.270, 14400: 0.9565}
    for interval_s, lost in said.items():
        assert intervals.waste(interval_s, 120, mtbf_s) == pytest.approx(lost, abs=0.001)
    assert intervals.efficiency(14400, 120, mtbf_s) == pytest.approx(0.329, abs=0.0005)
    assert intervals.optimum(120, mtbf_s) == pytest.approx(1271.2, abs=0.05)


def test_llama_3_on_16384_gpus() -> None:
    """C = 2.43 s, 50,000 h a GPU: every 4 minutes, 2.1 % lost."""
    mtbf_s = 50_000 * 3600 / 16_384
    best_s = intervals.optimum_safe_saves(2.43, mtbf_s)
    assert best_s == pytest.approx(4 * 60, rel=0.05)
    lost = intervals.segment_safe_saves_s(best_s, 2.43, mtbf_s) / best_s - 1
    assert lost == pytest.approx(0.021, abs=0.0005)


def test_daly_against_exact() -> None:
    """C = M/3 = 60 s: 109.69 and 110.00 s; from 2 M on it says M."""
    assert intervals.daly(60, 180) == pytest.approx(109.69, abs=0.005)
    assert intervals.optimum(60, 180) == pytest.approx(110.00, abs=0.005)
    assert intervals.daly(1, 300) == pytest.approx(intervals.optimum(1, 300), rel=1e-5)
    assert intervals.daly(700, 300) == 300


@given(costs, ratios)
def test_the_optimum_is_one(cost_s: float, ratio: float) -> None:
    """Nothing near it is better, with any restart and downtime: of both exact forms, and of the
    form in which saves cannot fail."""
    mtbf_s = cost_s / ratio
    best_s = intervals.optimum(cost_s, mtbf_s)
    safe_s = intervals.optimum_safe_saves(cost_s, mtbf_s)
    for factor in (0.9, 0.99, 1.01, 1.1):
        near_s = best_s * factor
        for restart_s, down_s in ((0.0, 0.0), (mtbf_s / 3, mtbf_s / 7)):
            more = {"restart_s": restart_s, "down_s": down_s}
            assert intervals.efficiency(best_s, cost_s, mtbf_s, **more) >= intervals.efficiency(
                near_s, cost_s, mtbf_s, **more
            )
        best = intervals.segment_safe_saves_s(safe_s, cost_s, mtbf_s) / safe_s
        assert best <= intervals.segment_safe_saves_s(safe_s * factor, cost_s, mtbf_s) / (
            safe_s * factor
        )


@given(costs, st.floats(1e7, 1e13))
def test_short_saves_give_young(cost_s: float, times: float) -> None:
    mtbf_s = cost_s * times
    young_s = intervals.young(cost_s, mtbf_s)
    assert intervals.optimum(cost_s, mtbf_s) == pytest.approx(young_s, rel=1e-3)
    assert intervals.optimum_safe_saves(cost_s, mtbf_s) == pytest.approx(young_s, rel=1e-3)


def test_long_saves_give_the_mtbf() -> None:
    assert intervals.optimum(1e6, 10) == pytest.approx(10)
    assert intervals.efficiency(10, 1e6, 10) == 0  # no such run ends
    assert intervals.segment_s(10, 1e6, 10) == math.inf


@given(costs, mtbfs, st.floats(1.01, 100))
def test_dearer_saves_are_rarer_and_so_are_fewer_failures(
    cost_s: float, mtbf_s: float, more: float
) -> None:
    best_s = intervals.optimum(cost_s, mtbf_s)
    assert best_s <= intervals.optimum(cost_s * more, mtbf_s)
    assert best_s < intervals.optimum(cost_s, mtbf_s * more)
    assert best_s < intervals.young(cost_s, mtbf_s)


def test_nothing_fails_or_saving_is_free() -> None:
    for best in (intervals.young, intervals.optimum, intervals.optimum_safe_saves):
        assert best(0, 100) == 0
        assert best(1, math.inf) == math.inf
        assert best(0, math.inf) == 0
    assert intervals.segment_s(10, 1, math.inf) == 11
    assert intervals.segment_safe_restart_s(10, 1, math.inf) == 11
    assert intervals.segment_safe_saves_s(10, 1, math.inf) == 11


def test_flushing_beside_the_steps() -> None:
    """The lag costs lambda F and moves nothing; slowed steps are a cost; no flush overlaps."""
    assert intervals.optimum_async(2, 30, 1e5) == intervals.optimum(2, 1e5)
    assert intervals.optimum_async(2, 30, 1e5, drag=0.1) == intervals.optimum(5, 1e5)
    assert intervals.optimum_async(2, 3000, 1e5) == 3000
    plain = intervals.waste(600, 2, 1e5, restart_s=60, down_s=10)
    assert plain == pytest.approx(2 / 600 + 370 / 1e5)
    assert intervals.waste(600, 2, 1e5, flush_s=30, drag=0.1, restart_s=60, down_s=10) == (
        pytest.approx(plain + 30 / 1e5 + 3 / 600)
    )
    with pytest.raises(UsageError, match="below flush_s"):
        intervals.waste(20, 2, 1e5, flush_s=30)


def test_the_flat_zone() -> None:
    """First order it is known: C/tau + tau/2M = least + 0.01 is a quadratic."""
    cost_s, mtbf_s = 5.0, 1e4

    def lost(interval_s: float) -> float:
        return intervals.waste(interval_s, cost_s, mtbf_s)

    best_s = intervals.young(cost_s, mtbf_s)
    level = lost(best_s) + 0.01
    root = math.sqrt(level**2 - 2 * cost_s / mtbf_s)
    zone = intervals.flat_zone(lost, best_s)
    assert zone.low_s == pytest.approx((level - root) * mtbf_s, rel=1e-6)
    assert zone.high_s == pytest.approx((level + root) * mtbf_s, rel=1e-6)
    assert zone.low_s < best_s / 2 < 2 * best_s < zone.high_s  # "about twice costs little"


def test_a_zone_without_end() -> None:
    assert intervals.flat_zone(lambda _: 0.995, 10.0) == (0.0, math.inf)


def test_the_regime_of_first_order() -> None:
    assert intervals.in_regime(30, 100)
    assert not intervals.in_regime(31, 100)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((-1, 100), "cost_s must be 0 or above"),
        ((math.nan, 100), "cost_s must be 0 or above"),
        ((math.inf, 100), "cost_s must be 0 or above"),
        ((1, 0), "mtbf_s must be above 0"),
        ((1, math.nan), "mtbf_s must be above 0"),
    ],
)
def test_impossible_input(arguments: tuple[float, float], said: str) -> None:
    for best in (
        intervals.young, intervals.daly, intervals.optimum, intervals.optimum_safe_saves,
    ):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            best(*arguments)
    with pytest.raises(UsageError, match="interval_s must be above 0"):
        intervals.efficiency(0, 1, 100)
    with pytest.raises(UsageError, match="restart_s must be 0 or above"):
        intervals.segment_s(10, 1, 100, restart_s=-1)
    with pytest.raises(UsageError, match="drag is a share"):
        intervals.optimum_async(1, 10, 100, drag=1.5)
