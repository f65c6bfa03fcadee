"""Multi-level checkpointing."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import UsageError
from outlast.theory.intervals import optimum, segment_s, waste
from outlast.theory.levels import Level, nested_s, pattern


def names(levels: list[Level], mtbf_s: float) -> list[str]:
    return [one.level.name for one in pattern(levels, mtbf_s).chosen]


def test_one_level_is_the_single_case() -> None:
    found = pattern([Level("durable", 30, 1.0, flush_s=100, restore_s=60)], 1e5, down_s=5)
    assert found.chosen[0].interval_s == optimum(30, 1e5)
    assert found.waste == pytest.approx(
        waste(optimum(30, 1e5), 30, 1e5, flush_s=100, restart_s=60, down_s=5)
    )


def test_each_level_has_its_own_failures() -> None:
    """Cheap saves for nine failures in ten: far less lost than with the deep level alone."""
    levels = [Level("memory", 0.5, 0.9), Level("durable", 60, 1.0)]
    found = pattern(levels, 1e4)
    assert [one.mtbf_s for one in found.chosen] == pytest.approx([1e4 / 0.9, 1e5])
    assert [one.interval_s for one in found.chosen] == pytest.approx(
        [math.sqrt(2 * 0.5 * 1e4 / 0.9), math.sqrt(2 * 60 * 1e5)], rel=0.02
    )
    first_order = math.sqrt(2 * 0.5 * 0.9e-4) + math.sqrt(2 * 60 * 1e-5)
    assert found.waste == pytest.approx(first_order, rel=0.01)
    assert found.waste < pattern(levels[1:], 1e4).waste / 2


def test_a_level_that_does_not_pay_is_left_out() -> None:
    durable = Level("durable", 10, 1.0)
    assert names([Level("memory", 20, 0.9), durable], 1e5) == ["durable"]
    assert names([Level("memory", 1, 0.0), durable], 1e5) == ["durable"]
    assert names([Level("memory", 1, 0.9), Level("local", 1, 0.9), durable], 1e5) == [
        "memory", "durable",
    ]  # fmt: skip


def test_a_deep_flush_holds_its_level_back() -> None:
    found = pattern([Level("memory", 1, 0.5), Level("durable", 0, 1.0, flush_s=5000)], 1e5)
    assert [one.interval_s for one in found.chosen] == pytest.approx([631, 5000], rel=0.01)


def test_free_levels_and_no_failures() -> None:
    assert pattern([Level("memory", 0, 0.5), Level("durable", 0, 1.0)], 1e5).waste == 0
    assert pattern([Level("memory", 1, 0.5), Level("durable", 1, 1.0)], math.inf).waste == 0


@given(
    st.lists(st.floats(0.01, 100), min_size=3, max_size=3),
    st.lists(st.floats(0, 1), min_size=3, max_size=3),
    st.floats(1e4, 1e8),
)
def test_the_choice_is_the_best_of_all(
    costs: list[float], survives: list[float], mtbf_s: float
) -> None:
    levels = [
        Level(name, cost, share)
        for name, cost, share in zip("abc", costs, sorted(survives), strict=True)
    ]
    found = pattern(levels, mtbf_s)
    assert found.chosen[-1].level.name == "c"
    gaps = [one.interval_s for one in found.chosen]
    assert gaps == sorted(gaps)
    for kept in itertools.product((True, False), repeat=2):
        fewer = [*itertools.compress(levels[:2], kept), levels[2]]
        assert found.waste <= pattern(fewer, mtbf_s).waste


def nested(
    chunk_s: float, deep_cost_s: float, rate: float, deep_rate: float, saves: int,
    draw: random.Random,
) -> float:  # fmt: skip
    """One round, told piece by piece."""
    spent_s, done = 0.0, 0
    while done <= saves:
        left_s = chunk_s if done < saves else deep_cost_s
        failure_s = draw.expovariate(rate + deep_rate)
        if failure_s >= left_s:
            spent_s, done = spent_s + left_s, done + 1
        else:
            spent_s += failure_s
            done = done if draw.random() * (rate + deep_rate) < rate else 0
    return spent_s


@pytest.mark.parametrize(
    ("chunk_s", "deep_cost_s", "deep_rate", "saves"),
    [(20, 5, 0.001, 8), (60, 60, 0.01, 3), (10, 0, 0.005, 1)],
)
def test_two_levels_as_simulated(
    chunk_s: float, deep_cost_s: float, deep_rate: float, saves: int
) -> None:
    """M = 200 s, the deep one's down to 100 s."""
    draw = random.Random(9)
    told = [nested(chunk_s, deep_cost_s, 0.005, deep_rate, saves, draw) for _ in range(5_000)]
    mean = math.fsum(told) / len(told)
    error = math.sqrt(math.fsum((one - mean) ** 2 for one in told)) / len(told)
    exact = nested_s(chunk_s - 2, 2, deep_cost_s, 200, 1 / deep_rate, saves=saves)
    assert abs(mean - exact) < 4 * error
    assert error < 0.03 * exact


def test_two_levels_that_are_one() -> None:
    assert nested_s(30, 2, 8, math.inf, 100, saves=5) == pytest.approx(segment_s(150, 18, 100))
    assert nested_s(30, 2, 0, 100, math.inf, saves=5) == pytest.approx(5 * segment_s(30, 2, 100))
    assert nested_s(30, 2, 8, math.inf, math.inf, saves=5) == 168
    assert nested_s(1e6, 2, 8, 100, 100) == math.inf


def test_two_levels_to_first_order() -> None:
    """The least of `pattern` is what nested saves lose where failures are rare."""
    levels = [Level("memory", 3, 10 / 11), Level("durable", 120, 1.0)]
    found = pattern(levels, 1 / 1.1e-7)
    shallow, deep = (one.interval_s for one in found.chosen)
    saves = round(deep / shallow)
    slower = nested_s(shallow, 3, 120, 1e7, 1e8, saves=saves) / (saves * shallow) - 1
    assert slower == pytest.approx(found.waste, rel=0.01)


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ([], "from 1 to 8 levels"),
        ([Level("memory", 1, 0.9), Level("local", 1, 0.5)], "local survives 0.5 .* above it 0.9"),
        ([Level("memory", -1, 0.9)], "memory: cost_s must be 0 or above"),
        ([Level("memory", 1, 1.1)], "memory: survives is a share"),
        ([Level("memory", 1, 1.0, flush_s=math.nan)], "memory: flush_s must be 0 or above"),
    ],
)
def test_impossible_levels(levels: list[Level], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        pattern(levels, 100)
