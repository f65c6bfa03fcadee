"""Slow ranks, slow collectives and uneven work in synthetic series."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.controller.sentinels.straggler_detection import (
    REST,
    SUSPECTS_MAX,
    WITNESSES_MAX,
    RankTime,
    StepRow,
    StragglerRecord,
    observe,
)
from outlast.testing.sentinels.straggler_series import (
    SHARES,
    SeriesKind,
    draw_mix,
    draw_series,
    judge,
    score,
)

PLAIN: tuple[SeriesKind, ...] = ("uneven", "noise", "warm-up", "pauses", "saves", "trend", "epochs")


def test_the_published_mix_is_told_apart() -> None:
    result = score(draw_mix(200, 16))
    assert result.right > 80
    assert result.precision >= 0.95 and result.recall >= 0.95
    assert result.delays[-1] <= 30


def test_slow_ranks_alone_are_told_apart() -> None:
    """Most of the mix is slow collectives, which must not hide errors about ranks."""
    kinds: tuple[SeriesKind, ...] = ("compute", "input", *PLAIN, "communication")
    many = (draw_series(kind, str(seed)) for seed in range(12) for kind in kinds)
    result = score(many, ranks_only=True)
    assert result.right > 20
    assert result.precision >= 0.95 and result.recall >= 0.95


@pytest.mark.parametrize("kind", PLAIN)
def test_nobody_is_blamed_for(kind: SeriesKind) -> None:
    assert [judge(draw_series(kind, f"plain {seed}")) for seed in range(5)] == [()] * 5


def test_the_shares_of_the_mix_are_those_of_the_issue() -> None:
    assert sum(SHARES.values()) == 100 and SHARES["communication"] == 40


def play(
    own: Callable[[int, int], float], world: int = 4, steps: int = 120, rest_s: float = 0.02
) -> StragglerRecord:
    """Take steps in which rank r of step s takes own(r, s) seconds."""
    record = StragglerRecord()
    for step in range(1, steps + 1):
        ranks = {rank: RankTime(own(rank, step)) for rank in range(world)}
        longest_s = max(each.own_s for each in ranks.values())
        observe(record, StepRow(step, 1, longest_s + rest_s, ranks), [tuple(range(world))])
    return record


def noisy(seed: int = 0, part: float = 0.03) -> Callable[[], float]:
    dice = random.Random(seed)
    return lambda: 1 + dice.gauss(0, part)


def test_evidence_names_the_rank_the_factor_and_the_step() -> None:
    noise = noisy()
    record = play(lambda r, s: 0.1 * noise() * (1.3 if r == 2 and s >= 60 else 1))
    assert record.slow.keys() == {2}
    found = record.slow[2]
    assert found.excess == pytest.approx(0.3, abs=0.05)
    assert abs(found.since - 60) <= 2
    assert found.own_s == pytest.approx(0.13, rel=0.05)
    assert found.peers_s == pytest.approx(0.1, rel=0.05)
    assert found.confidence > 0.999
    assert found.lost_s == pytest.approx(61 * 0.03, rel=0.3)
    assert not found.is_before


def test_time_before_the_phase_is_told_from_time_in_it() -> None:
    record = StragglerRecord()
    for step in range(1, 80):
        ranks = {rank: RankTime(0.1, 0.01) for rank in range(4)}
        ranks[3] = RankTime(0.14, 0.05)
        observe(record, StepRow(step, 1, 0.16, ranks), [range(4)])
    assert record.slow[3].is_before


def test_two_slow_ranks_are_both_named() -> None:
    noise = noisy()
    record = play(lambda r, s: 0.1 * noise() * (1.4 if r in (1, 6) and s > 40 else 1), world=8)
    assert record.slow.keys() == {1, 6}


def test_of_two_ranks_the_slower_one_is_named() -> None:
    noise = noisy()
    record = play(lambda r, s: 0.1 * noise() * (1.4 if r == 0 and s > 40 else 1), world=2)
    assert record.slow.keys() == {0}


def test_a_rank_that_is_fast_again_is_slow_no_more() -> None:
    noise = noisy()
    record = play(lambda r, s: 0.1 * noise() * (1.5 if r == 1 and 30 <= s < 70 else 1))
    assert record.slow == {} and 1 not in record.suspects


def test_one_rank_alone_is_not_judged() -> None:
    assert play(lambda _r, s: 0.1 if s < 50 else 0.3, world=1).slow == {}


def test_stages_of_a_pipeline_are_compared_with_their_own() -> None:
    noise = noisy()
    record = StragglerRecord()
    for step in range(1, 100):
        times = (0.1, 0.1, 0.2, 0.2 if step < 50 else 0.28)
        ranks = {rank: RankTime(own_s * noise()) for rank, own_s in enumerate(times)}
        observe(record, StepRow(step, 1, 0.4, ranks), [(0, 1), (2, 3)])
    assert record.slow.keys() == {3}


def test_a_short_part_of_a_long_step_does_not_count() -> None:
    """A rank whose own part is a hundredth of the step makes nobody wait for long."""
    record = play(lambda r, _s: 0.02 if r == 1 else 0.01, rest_s=1.0)
    assert record.slow == {}


def test_slow_collectives_blame_no_rank() -> None:
    noise = noisy()
    record = StragglerRecord()
    for step in range(1, 120):
        ranks = {rank: RankTime(0.1 * noise()) for rank in range(8)}
        observe(record, StepRow(step, 1, 0.15 if step < 60 else 0.22, ranks), [range(8)])
    assert record.slow.keys() == {REST}
    assert record.slow[REST].own_s == pytest.approx(0.11, rel=0.15)


def test_lasting_differences_of_many_are_no_machine() -> None:
    """Uneven shards: each rank has its own pace, and one of them is the slowest."""
    noise = noisy()
    pace = [0.8, 0.88, 0.94, 1.0, 1.05, 1.12, 1.18, 1.27]
    assert play(lambda r, _s: 0.1 * pace[r] * noise(), world=8).slow == {}


def test_memory_is_bounded_at_16384_ranks() -> None:
    dice = random.Random(1)
    record = StragglerRecord()
    world = 16_384
    for step in range(1, 40):
        ranks = {rank: RankTime(0.1 * (1 + dice.gauss(0, 0.3))) for rank in range(world)}
        ranks[777] = RankTime(0.5)
        observe(record, StepRow(step, 1, 0.6, ranks), [range(world)])
    assert len(record.suspects) <= SUSPECTS_MAX and 777 in record.suspects
    assert len(record.spread.excess) <= WITNESSES_MAX


@given(
    st.lists(
        st.lists(st.floats(0, 1e6, allow_nan=False), min_size=3, max_size=3),
        min_size=1, max_size=60,
    )
)  # fmt: skip
def test_any_times_are_taken(rows: list[list[float]]) -> None:
    """Zeros, and times that differ by orders of magnitude."""
    record = StragglerRecord()
    for step, row in enumerate(rows, 1):
        ranks = {rank: RankTime(own_s) for rank, own_s in enumerate(row)}
        observe(record, StepRow(step, 1, max(row), ranks), [range(3)])
    assert all(one.lost_s >= 0 and one.excess > 0 for one in record.slow.values())


@pytest.mark.long
def test_a_hundred_undisturbed_hours_blame_nobody() -> None:
    """An hour each of steps of 0.2 to 2 s, with noise, pauses, saves, epochs and uneven work."""
    blamed = []
    for seed in range(100):
        kind = PLAIN[seed % len(PLAIN)]
        length_s = random.Random(seed).uniform(0.2, 2.0)
        series = draw_series(kind, f"hour {seed}", steps=int(3600 / length_s))
        if found := judge(series):
            blamed.append((kind, seed, found))
    assert blamed == []
