"""Deals of batches: each batch of an epoch is trained exactly once under any change of ranks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.data.batch_deal import BatchDeal

WORLDS = st.integers(2, 6)


@st.composite
def changes(draw: st.DrawFn, world: int) -> list[tuple[tuple[int, ...], ...]]:
    """Return the changes of who is present inside each step: some rank always stays."""
    found: list[tuple[tuple[int, ...], ...]] = []
    before = set(range(world))
    for _ in range(draw(st.integers(0, 30))):
        steps: list[tuple[int, ...]] = []
        for _ in range(draw(st.sampled_from((0, 0, 0, 1, 1, 2)))):
            stays = draw(st.sampled_from(sorted(before)))
            before = {stays, *draw(st.sets(st.integers(0, world - 1)))}
            steps.append(tuple(sorted(before)))
        found.append(tuple(steps))
    return found


@given(st.data())
def test_each_batch_is_trained_once(data: st.DataObject) -> None:
    world, rows = data.draw(WORLDS), data.draw(st.integers(1, 12))
    first = data.draw(st.integers(0, rows - 1))
    plan = data.draw(changes(world))
    deal = BatchDeal(world, rows, row=first, step=40)
    older = BatchDeal.at(deal.place())
    late = BatchDeal.at(deal.place())  # of a rank that has yet to begin the step of a change
    trained = Counter(range(first * world))
    everybody = tuple(range(world))
    for steps in [*plan, *[(everybody,)] * (rows * world)]:
        read = {rank: deal.hand.batches.get(rank, deal.hand.read) for rank in deal.present}
        for present in steps:
            deal.change(deal.step, present)
            late.change(deal.step, present)
            assert late.place() == deal.place()
            assert {*deal.hand.batches, *deal.hand.idle} == set(present)
            now = {**dict.fromkeys(present, deal.hand.read), **deal.hand.batches}
            read = {rank: read.get(rank, now[rank]) for rank in present}
            assert BatchDeal.at(deal.place()).hand == deal.hand
        assert deal.hand.batches.items() <= read.items(), "a batch is not what its rank has read"
        assert sum(deal.weight(rank) for rank in everybody) == pytest.approx(world)
        trained.update(deal.hand.batches.values())
        if deal.is_over:
            break
        if steps:  # a new worker knows only the place at the beginning of the step
            older.change(deal.step, steps[-1])
            assert older.place() == deal.place()
        late = BatchDeal.at(deal.place())
        deal.deal()
        older = BatchDeal.at(deal.place())
    assert deal.is_over and trained == Counter(range(world * rows))


def test_ranks_take_their_own_batches_again() -> None:
    deal = BatchDeal(3, 6, row=0, step=0)
    deal.change(0, (0, 1))
    assert deal.deal().batches == {0: 2, 1: 3}
    assert deal.deal().batches == {0: 4, 1: 5}
    assert not deal.is_plain
    deal.change(2, (0, 1, 2))
    assert deal.hand.idle == (2,) and deal.weight(0) == 1.5 and deal.weight(2) == 0
    assert deal.is_plain and deal.deal().batches == {0: 6, 1: 7, 2: 8}


def test_batches_without_numbers_stay_with_their_ranks() -> None:
    deal = BatchDeal(2, None, row=0, step=7)
    deal.change(7, (1,))
    assert deal.weight(1) == 2 and not deal.is_over
    assert deal.deal().of(1) is not None and deal.hand.of(0) is None
