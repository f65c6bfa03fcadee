"""Memory of checks: counter rises over resets, flaps, and events until quiet."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.health.judged_samples import SECOND_NS, T0_NS

from outlast.health.check_memory import (
    KEYS_MAX,
    POINTS_MAX,
    CheckMemory,
    Flap,
    FlapRule,
    counter_rise,
    flap_after,
    still_holding,
    updated_memory,
)
from outlast.log_records import Finding

RULE = FlapRule(times=3, window_s=3600, recovery_s=1800)


def at(t_s: float) -> int:
    return T0_NS + round(t_s * SECOND_NS)


def seen(
    memory: CheckMemory, t_s: float, value: int, *, flaps: bool = True, boot: str = ""
) -> CheckMemory:
    return updated_memory(
        memory, boot=boot, counts={"k": (value, flaps)}, events=[], now_ns=at(t_s), rule=RULE
    )


def finding(t_s: float = 0.0, severity: str = "now", device: str = "d") -> Finding:
    return Finding(
        t_ns=at(t_s), cluster="c", node="n", check="kernel", symptom="other",
        severity=severity, code="", device=device, detail="it broke",  # type: ignore[arg-type]
    )  # fmt: skip


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.sets(st.integers(0, 29)))
@settings(max_examples=60)
def test_a_rise_is_the_sum_of_what_was_counted_over_any_resets(
    new: list[int], resets: set[int]
) -> None:
    """After a reset the counter begins from zero; what it had counted before is not lost."""
    value, points, truth = 7, [(at(0), 7)], 0
    for k, step in enumerate(new, 1):
        if k in resets and step < value:
            value = step  # reset, then counted: seen as one smaller value
        else:
            value += step
        truth += step
        points.append((at(k), value))
    *before, (now_ns, last) = points
    assert counter_rise(before, last, now_ns, 1e6) == truth


def test_a_rise_is_over_the_window_and_not_known_at_first() -> None:
    assert counter_rise([], 5, at(0), 60) is None
    points = [(at(0), 0), (at(100), 10), (at(200), 30)]
    assert counter_rise(points, 31, at(210), 60) == 21, "since the last look before the window"
    assert counter_rise(points, 31, at(210), 5) == 1
    assert counter_rise(points, 31, at(210), 1e6) == 31


def flapping(events: list[tuple[float, int]], now_s: float) -> bool:
    memory = seen(CheckMemory(), 0, 0)
    total = 0
    for t_s, many in events:
        total += many
        memory = seen(memory, t_s, total)
    return flap_after(memory, "k", total, at(now_s), RULE).flapping


def test_three_in_an_hour_flap_until_half_an_hour_of_quiet() -> None:
    assert not flapping([(60, 1), (120, 1)], 130)
    assert flapping([(60, 1), (120, 1), (180, 1)], 190)
    assert flapping([(60, 1), (120, 1), (180, 1)], 180 + 1799)
    assert not flapping([(60, 1), (120, 1), (180, 1)], 180 + 1800)
    assert flapping([(60, 3)], 61), "three times between two looks"
    assert not flapping([(0 + 60, 1), (3000, 1), (3700, 1)], 3701), "not within one hour"


def test_a_flap_goes_on_while_single_events_come() -> None:
    """An event within the recovery time keeps it, though the hour has less than three."""
    events = [(60.0, 3)] + [(60 + 1700.0 * k, 1) for k in range(1, 6)]
    assert flapping(events, events[-1][0] + 1700)
    assert not flapping(events, events[-1][0] + 1800)


def test_a_quiet_flap_is_not_reopened_by_one_event() -> None:
    assert not flapping([(60, 3), (60 + 1900, 0), (60 + 2000, 1)], 60 + 2001)


@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 3)), max_size=40))
@settings(max_examples=60)
def test_flaps_agree_with_a_reference_implementation(steps: list[tuple[int, int]]) -> None:
    """Held against the definition, over all events since the begin."""
    memory, t_s, total = seen(CheckMemory(), 0, 0), 0, 0
    events: list[int] = []
    truth = False
    for gap, many in steps:
        t_s += gap
        total += many
        events += [t_s] * many
        if not truth or many:
            truth = truth or sum(each > t_s - 3600 for each in events) >= 3
        if truth and t_s - events[-1] >= 1800:
            truth, events = False, []
        memory = seen(memory, t_s, total)
        assert memory.flaps.get("k", Flap()).flapping == truth


def test_a_finding_of_an_event_holds_until_quiet_and_ends_with_a_boot() -> None:
    memory = updated_memory(
        CheckMemory(boot="a"), boot="a", counts={}, events=[finding()], now_ns=at(1), rule=RULE
    )
    (held,) = still_holding(memory, [], at(1000), 1800)
    assert held.finding == finding() and held.last_ns == at(0)
    assert still_holding(memory, [finding(5)], at(1000), 1800) == [], "it is found anew"
    assert still_holding(memory, [], at(1800), 1800) == []
    later = updated_memory(memory, boot="b", counts={}, events=[], now_ns=at(9), rule=RULE)
    assert later.findings == {} and later.boot == "b"


def test_a_held_finding_ends_where_it_is_well_again() -> None:
    memory = updated_memory(
        CheckMemory(), boot="", counts={}, events=[finding()], now_ns=at(1), rule=RULE
    )
    well = finding(60, severity="healthy")
    memory = updated_memory(memory, boot="", counts={}, events=[well], now_ns=at(61), rule=RULE)
    assert still_holding(memory, [], at(62), 1800) == []


def test_memory_is_bounded() -> None:
    memory = CheckMemory()
    for k in range(POINTS_MAX * 4):
        memory = seen(memory, float(k), k)
    points = memory.counters["k"]
    assert len(points) <= POINTS_MAX and points[-1][1] == POINTS_MAX * 4 - 1
    assert (
        counter_rise(points, points[-1][1], at(POINTS_MAX * 4), 1e6) == points[-1][1] - points[0][1]
    )
    counts = {f"k{k}": (k, False) for k in range(KEYS_MAX + 50)}
    memory = updated_memory(memory, boot="", counts=counts, events=[], now_ns=at(1e4), rule=RULE)
    assert len(memory.counters) == KEYS_MAX
    events = [finding(k, device=str(k)) for k in range(KEYS_MAX + 50)]
    rule = RULE._replace(recovery_s=1e8)
    memory = updated_memory(memory, boot="", counts={}, events=events, now_ns=at(1e4), rule=rule)
    assert len(memory.findings) == KEYS_MAX and finding(0).device not in memory.findings


def test_a_clock_that_was_set_back_ends_no_flap_and_keeps_none_for_ever() -> None:
    ahead = seen(seen(CheckMemory(), 1e8, 0), 1e8 + 60, 3)
    assert ahead.flaps["k"].flapping
    back = seen(ahead, 60, 3)
    assert back.flaps["k"].flapping, "a second is enough to set a clock back"
    assert flap_after(back, "k", 3, at(60 + 1799), RULE).flapping
    assert not flap_after(back, "k", 3, at(60 + 1800), RULE).flapping


def test_a_clock_that_was_set_back_ends_no_finding_and_keeps_none_for_ever() -> None:
    ahead = finding(1e8)
    memory = updated_memory(
        CheckMemory(), boot="", counts={}, events=[ahead], now_ns=at(1e8), rule=RULE
    )
    assert [held.finding for held in still_holding(memory, [], at(60), 1800)] == [ahead]
    back = updated_memory(memory, boot="", counts={}, events=[], now_ns=at(60), rule=RULE)
    assert len(still_holding(back, [], at(60 + 1799), 1800)) == 1
    assert still_holding(back, [], at(60 + 1800), 1800) == []
