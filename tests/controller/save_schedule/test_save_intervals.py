"""Save intervals: choice, bounds, refusals and explanations."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outlast.controller.save_schedule.save_intervals import (
    FIRST_S,
    IntervalChoice,
    Schedule,
    decide,
    explain,
    span,
)
from outlast.controller.save_schedule.save_tiers import (
    WINDOW,
    IntervalBounds,
    Name,
    RunningMedian,
    SaveCosts,
    SaveTier,
    ScheduleInputs,
    survival,
)
from outlast.errors import ConfigError, UsageError
from outlast.theory.failures import preset
from outlast.theory.intervals import optimum

FREE = IntervalBounds(max_s=1e9)


def tier(
    name: Name, blocking_s: float, flush_s: float = 0.0, drag_s: float = 0.0, **more: Any
) -> SaveTier:
    costs = SaveCosts().saved(blocking_s=blocking_s, flush_s=flush_s, drag_s=drag_s)
    return SaveTier(name=name, costs=costs, **{"bounds": FREE, **more})


def facts(*tiers: SaveTier, **more: Any) -> ScheduleInputs:
    """2,048 GPUs at Llama 3's rate: a failure every 24.7 hours; 3 s steps."""
    known = {
        "step": RunningMedian((3.0,)),
        "devices": 2048,
        "failures": 0,
        "exposure_device_s": 0.0,
    }
    return ScheduleInputs(tiers=tiers, **{**known, **more})


def three(**more: Any) -> ScheduleInputs:
    return facts(tier("memory", 0.2, 2), tier("local", 0.5, 12), tier("durable", 4, 200), **more)


def only(given: ScheduleInputs, before: Schedule | None = None) -> IntervalChoice:
    (choice,) = decide(given, before).choices
    return choice


def test_one_tier_gets_the_exact_optimum() -> None:
    schedule = decide(facts(tier("durable", 30)))
    (choice,) = schedule.choices
    assert schedule.mtbf_s == pytest.approx(54 * 86400 / 419 * 8)
    assert choice.optimum_s == optimum(30, schedule.mtbf_s)
    assert choice.every_steps == round(choice.optimum_s / 3)
    assert choice.reason == "optimum"
    assert choice.flat_s[0] < choice.optimum_s < choice.flat_s[1]


def test_three_tiers_nest() -> None:
    memory, local, durable = decide(three()).choices
    assert 1 < memory.every_steps < local.every_steps < durable.every_steps
    assert local.every_steps % memory.every_steps == 0
    assert durable.every_steps % local.every_steps == 0
    assert [one.survives for one in (memory, local, durable)] == [0.9, 0.95, 1.0]


def test_due_says_who_saves_when() -> None:
    schedule = decide(three())
    memory, local, durable = (one.every_steps for one in schedule.choices)
    assert schedule.due(0) == ()
    assert schedule.due(memory) == ("memory",)
    assert schedule.due(memory + 1) == ()
    assert schedule.due(local) == ("memory", "local")
    assert schedule.due(durable) == ("memory", "local", "durable")


def test_no_failures_for_long_make_saves_rarer() -> None:
    fresh = decide(three())
    calm = decide(three(exposure_device_s=2048 * 30 * 86400.0))
    assert calm.mtbf_s > 10 * fresh.mtbf_s
    for early, late in zip(fresh.choices, calm.choices, strict=True):
        assert late.every_steps > 2 * early.every_steps


def test_many_failures_make_saves_more_frequent() -> None:
    day = 2048 * 86400.0
    bad = decide(three(failures=100, exposure_device_s=day))
    assert bad.mtbf_s == pytest.approx(86400 / 100, rel=0.02)
    for early, late in zip(decide(three()).choices, bad.choices, strict=True):
        assert late.every_steps < early.every_steps / 3


def test_where_failures_are_restored_from_moves_intervals() -> None:
    """Memory that never survived is worth little: deeper saves come more often."""
    seen = {"failures": 40, "exposure_device_s": 2048 * 40 * 86400.0}
    served = facts(tier("memory", 1, restored=40), tier("durable", 4), **seen)
    missed = facts(tier("memory", 1), tier("durable", 4, restored=40), **seen)
    assert survival(served.tiers)["memory"] == pytest.approx(41.8 / 42)
    assert survival(missed.tiers)["memory"] == pytest.approx(1.8 / 42)
    assert decide(served).choices[1].every_steps > 3 * decide(missed).choices[1].every_steps


def test_free_saves_are_made_at_every_step() -> None:
    assert only(facts(tier("durable", 0))).every_steps == 1


def test_a_cost_beyond_the_mtbf() -> None:
    """No interval helps: the one of least harm, M, and a warning."""
    given = facts(tier("durable", 1e6))
    choice = only(given)
    assert choice.every_steps * 3 == pytest.approx(choice.mtbf_s, rel=0.01)
    assert "a save takes longer than the job runs between failures" in explain(decide(given), given)


def test_cheap_memory_is_saved_every_step() -> None:
    """At most 1 % of a step; not while the last copy is still on its way; and not other tiers."""
    assert only(facts(tier("memory", 0.029))).reason == "cheap"
    assert only(facts(tier("memory", 0.029))).every_steps == 1
    assert only(facts(tier("memory", 0.031))).every_steps > 1
    assert only(facts(tier("memory", 0.029), cheap_share=0.0)).every_steps > 1
    assert only(facts(tier("memory", 0.029, 10))).every_steps == 4
    bounds = IntervalBounds(min_s=300, max_steps=9)
    assert only(facts(tier("memory", 0.029, bounds=bounds))).every_steps == 9
    assert only(facts(tier("durable", 0.029))).every_steps > 1


def test_cheap_is_not_lost_to_noise() -> None:
    before = decide(facts(tier("memory", 0.029)))
    assert only(facts(tier("memory", 0.035)), before).every_steps == 1
    assert only(facts(tier("memory", 0.050)), before).every_steps > 1


def test_a_tier_that_has_not_been_timed() -> None:
    """First saves come soon, whatever the others do; the rest is as without it."""
    memory, durable = decide(facts(SaveTier(name="memory"), tier("durable", 30))).choices
    assert (memory.every_steps, memory.reason) == (FIRST_S / 3, "unmeasured")
    assert durable.every_steps % memory.every_steps == 0
    assert durable.optimum_s == only(facts(tier("durable", 30))).optimum_s


def test_a_tier_that_does_not_pay_goes_with_the_next() -> None:
    memory, durable = decide(facts(tier("memory", 50), tier("durable", 30))).choices
    assert memory.reason == "covered"
    assert memory.every_steps == durable.every_steps
    bounded = tier("memory", 50, bounds=IntervalBounds(max_steps=7))
    assert decide(facts(bounded, tier("durable", 30))).choices[0].every_steps == 7


@pytest.mark.parametrize(
    ("bounds", "every", "said"),
    [
        (IntervalBounds(max_s=60), 20, "max_s = 60"),
        (IntervalBounds(max_steps=9), 9, "max_steps = 9"),
        (IntervalBounds(min_s=1e5, max_s=1e9), 33334, "min_s = 100000"),
        (IntervalBounds(min_steps=50_000, max_s=1e9), 50_000, "min_steps = 50,000"),
        (IntervalBounds(min_s=300, max_steps=9), 9, "max_steps = 9"),  # a maximum beats a minimum
        (IntervalBounds(max_s=0.5), 1, "max_s = 0.5"),  # and a step cannot be cut
    ],
)
def test_bounds_bite(bounds: IntervalBounds, every: int, said: str) -> None:
    given = facts(tier("durable", 30, bounds=bounds))
    assert only(given).every_steps == every
    assert f"the nearest to the optimum that {said} allows" in explain(decide(given), given)


def test_a_flush_beats_every_bound() -> None:
    choice = only(facts(tier("durable", 0.01, 1000, bounds=IntervalBounds(max_s=60))))
    assert (choice.every_steps, choice.reason) == (334, "flush")


def test_a_deeper_maximum_holds_for_shallower_tiers() -> None:
    """A durable save every 10 steps is a memory save as well."""
    memory, durable = decide(
        facts(tier("memory", 1), tier("durable", 1, bounds=IntervalBounds(max_steps=10)))
    ).choices
    assert memory.every_steps <= durable.every_steps <= 10


@given(st.lists(st.floats(0.85, 1.15), min_size=10, max_size=10))
def test_noise_moves_nothing(noise: list[float]) -> None:
    schedule = decide(three())
    for factor in noise:
        given = facts(
            tier("memory", 0.2 * factor, 2),
            tier("local", 0.5 / factor, 12),
            tier("durable", 4 * factor, 200),
            step=RunningMedian((3.0 * factor,)),
        )
        after = decide(given, schedule)
        assert [one.every_steps for one in after.choices] == [
            one.every_steps for one in schedule.choices
        ]


def test_a_change_that_pays_is_followed() -> None:
    """Four times the cost is twice the interval, though both lie in the flat zone."""
    before = decide(facts(tier("durable", 4)))
    after = only(facts(tier("durable", 16)), before)
    assert after.every_steps == pytest.approx(2 * before.choices[0].every_steps, rel=0.02)
    assert after.flat_s[0] < before.choices[0].every_steps * 3 < after.flat_s[1]


def test_a_small_gain_is_not() -> None:
    before = decide(facts(tier("durable", 4)))
    after = only(facts(tier("durable", 6)), before)
    assert (after.every_steps, after.reason) == (before.choices[0].every_steps, "kept")


times = st.just(0.0) | st.floats(1e-9, 1e5)  # a clock counts nanoseconds
maybe = st.none() | st.tuples(times, times)


@example(  # covered by the deeper tier at the shortest interval that there is: not cheap for that
    ((792.49, 73472.87), None, (0.0, 22497.05)), 6946.43, 43208, 1373, 7.15e13, 352, 703126.67
)
@given(
    st.tuples(maybe, maybe, maybe).filter(any),
    st.floats(1e-3, 1e4),
    st.integers(1, 10**6),
    st.integers(0, 10**5),
    st.floats(1, 1e15),
    st.integers(1, 1000),
    st.floats(1, 1e6),
)
def test_whatever_is_measured(
    measured: tuple[tuple[float, float] | None, ...], step_s: float, devices: int, failures: int,
    exposure_device_s: float, max_steps: int, max_s: float,
) -> None:  # fmt: skip
    """Always an answer: the same every time, within bounds, in the same words, and able to
    travel; and a second decision from the same facts changes nothing."""
    names: tuple[Name, ...] = ("memory", "local", "durable")
    bounds = IntervalBounds(max_steps=max_steps, max_s=max_s)
    given = facts(
        *(tier(n, *of, bounds=bounds) for n, of in zip(names, measured, strict=True) if of),
        step=RunningMedian((step_s,)), devices=devices, failures=failures,
        exposure_device_s=exposure_device_s,
    )  # fmt: skip
    schedule = decide(given)
    assert schedule == decide(given)
    for choice, one in zip(schedule.choices, given.tiers, strict=True):
        flush = math.ceil(one.costs.flush.median_s / step_s)
        assert choice.every_steps >= 1
        assert flush <= choice.every_steps <= max(flush, max(1, min(max_steps, max_s / step_s)))
    again = decide(given, schedule)
    assert [one.every_steps for one in again.choices] == [
        one.every_steps for one in schedule.choices
    ]
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode(schedule), type=Schedule) == schedule
    text = explain(schedule, given)
    assert "nan" not in text and "inf" not in text
    assert all(f"{one.name}: every" in text for one in given.tiers)


def test_it_explains_itself() -> None:
    given = facts(
        tier("memory", 0.2, 2, restored=2), tier("local", 0.5, 12), failures=3,
        exposure_device_s=2048 * 259_200.0,
    )  # fmt: skip
    text = explain(decide(given), given)
    for words in (
        "failures: one every 1.01 d on 2,048 devices (90 %: 13.3 h to 2.57 d): 3 seen in 147,456"
        " device-hours, and llama3-405b, which weighs as 2 (419 unexpected",
        "C = 200 ms a save",
        "R = not measured to restore",
        "95 % of all (2 seen, 90 % assumed)",
        "within one point of waste from",
        "cost: ",
        "warning: no tier survives 2.5 % of failures",
        "tau* = M [1 + W0(-e^(-1 - C/M))]",
    ):
        assert words in text


def test_rough_first_order_is_said() -> None:
    given = facts(tier("durable", 30), failures=10_000, exposure_device_s=2048 * 432_000.0)
    assert "first order is rough here" in explain(decide(given), given)
    calm = facts(tier("durable", 30))
    assert "rough" not in explain(decide(calm), calm)


def test_words_for_times() -> None:
    said = {0: "0 s", 0.0123: "12.3 ms", 59: "59 s", 90: "1.5 min", 1.2e8: "1,389 d", 1e9: "never"}
    assert {seconds: span(seconds) for seconds in said} == said


def test_one_slow_save_moves_nothing() -> None:
    costs = SaveCosts()
    for blocking_s in (1.0, 1.1, 0.9, 60.0, 1.0):
        costs = costs.saved(blocking_s=blocking_s, flush_s=2, drag_s=0.5).restored(7)
    assert (costs.blocking.median_s, costs.cost_s, costs.restore.median_s) == (1.0, 1.5, 7)
    running = RunningMedian()
    for value in range(100):
        running = running.add(value)
    assert len(running.values) == WINDOW
    assert running.median_s == 99 - WINDOW // 2
    assert RunningMedian((1.0, 2.0)).median_s == 1.5
    assert RunningMedian().median_s == 0


@pytest.mark.parametrize("value_s", [-1.0, math.nan, math.inf])
def test_what_no_clock_measures(value_s: float) -> None:
    with pytest.raises(UsageError, match="a measured time must be 0 or above"):
        RunningMedian().add(value_s)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (facts(), "tiers must be some of memory, local, durable, .* not none"),
        (
            facts(SaveTier(name="local"), SaveTier(name="memory")),
            "in this order, not local, memory",
        ),
        (facts(SaveTier(name="local"), SaveTier(name="local")), "each once"),
        (facts(SaveTier(name="local"), step=RunningMedian()), "step time .* must be above 0"),
        (facts(SaveTier(name="local"), devices=0), "devices must be above 0"),
        (facts(SaveTier(name="local"), failures=-1), "failures must be 0 or above"),
        (facts(SaveTier(name="local"), failures=2), "2 failures without any exposure"),
        (facts(SaveTier(name="local", restored=1)), "1 restored failures exceed 0 observed"),
        (facts(SaveTier(name="local", survives=1.5)), "local: survives is a share"),
        (facts(SaveTier(name="local"), cheap_share=-1), "cheap_share is a share"),
        (
            facts(SaveTier(name="local", bounds=IntervalBounds(max_s=0))),
            "local: max_s must be above 0",
        ),
        (
            facts(SaveTier(name="local", bounds=IntervalBounds(min_s=math.nan))),
            "local: min_s must be",
        ),
    ],
)
def test_nonsense_is_refused(given: ScheduleInputs, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        decide(given)


@pytest.mark.parametrize(
    "bounds",
    [
        IntervalBounds(min_steps=0),
        IntervalBounds(min_steps=9, max_steps=8),
        IntervalBounds(min_s=9, max_s=8),
    ],
)
def test_settings_that_nothing_satisfies(bounds: IntervalBounds) -> None:
    with pytest.raises(ConfigError, match="durable: no interval lies within"):
        decide(facts(SaveTier(name="durable", bounds=bounds)))


def test_a_deeper_tier_survives_no_less() -> None:
    upper = SaveTier(name="memory", survives=0.9)
    with pytest.raises(ConfigError, match=r"survives must not fall .* 0.9, 0.5"):
        decide(facts(upper, SaveTier(name="local", survives=0.5)))


def test_another_prior() -> None:
    rare = decide(facts(tier("durable", 30), prior=preset("rsc-2")))
    often = decide(facts(tier("durable", 30), prior=preset("180-days")))
    assert often.choices[0].every_steps < rare.choices[0].every_steps
