"""Donors by shard: a joiner gets the state of a rank with the same shards, or all roll back."""

from __future__ import annotations

import pytest
from tests.controller.controller_driver import ControllerDriver

from outlast import events
from outlast.controller.inputs import ShardsHeld
from outlast.transport import messages

HYBRID = (b"a", b"b", b"a", b"b")
SLOTS = {"before:1": b"own"}


def sharded(shards: tuple[bytes, ...] = HYBRID, journal: bool = False) -> ControllerDriver:
    """A run whose ranks have reported their shards, and have completed a phase."""
    desk = ControllerDriver(world=len(shards), spares=2).begin().open()
    for worker, held in zip(desk.seats(), shards, strict=True):
        report(desk, worker, held)
    desk.commit(1)
    return desk


def report(desk: ControllerDriver, worker: str, shards: bytes) -> None:
    desk.say(worker, messages.StateProtected(schema="s", summary="", shards=shards))


def reason(desk: ControllerDriver) -> str:
    return desk.emitted(events.Decided, history=True)[-1].reason


def answer(desk: ControllerDriver) -> None:
    """All workers that are left answer that they stand before phase 2."""
    for worker in desk.seats():
        if worker in desk.state.members.workers:
            desk.status(worker, 1, "idle")


def connect(desk: ControllerDriver, joiners: dict[int, bytes]) -> tuple[tuple[int, int], ...]:
    """Report what the joiners hold, make all ready, and return the transfers."""
    for seat, held in joiners.items():
        report(desk, desk.seats()[seat], held)
    generation = desk.state.generation
    for worker in desk.seats():
        desk.say(worker, messages.WorkerReady(generation=generation, n=1))
    return desk.state.progress.transfers


def test_the_donor_holds_the_shards_of_the_lost_rank() -> None:
    desk = sharded()
    desk.lose("w1-1", n=1, slots=SLOTS)
    answer(desk)
    assert desk.state.mode == "gathering"
    assert connect(desk, {1: b"b"}) == ((3, 1),)


def test_two_ranks_of_two_replica_sets_have_donors_of_their_own() -> None:
    desk = sharded()
    desk.lose("w1-0", n=1, slots=SLOTS)
    desk.lose("w1-3", n=1, slots=SLOTS)
    answer(desk)
    assert connect(desk, {0: b"a", 3: b"b"}) == ((2, 0), (1, 3))


@pytest.mark.parametrize("lost", [("w1-1", "w1-3"), ("w1-3", "w1-1")])
def test_a_replica_set_that_is_gone_brings_all_back(lost: tuple[str, str]) -> None:
    desk = sharded()
    for worker in lost:
        desk.lose(worker, n=1, slots=SLOTS)
    answer(desk)
    assert desk.state.mode == "clearing"
    assert "no other rank holds the shards of ranks 1, 3" in reason(desk)


def test_a_shard_without_a_replica_brings_all_back() -> None:
    desk = sharded((b"a", b"b"))
    desk.lose("w1-0", n=1, slots=SLOTS)
    answer(desk)
    assert desk.state.mode == "clearing"
    assert "no other rank holds the shards of rank 0" in reason(desk)


def test_a_rank_lost_before_its_report_is_judged_by_its_next_worker() -> None:
    desk = ControllerDriver(world=2, spares=1).begin().open()
    report(desk, "w1-0", b"a")
    desk.commit(1)
    desk.lose("w1-1", n=1, slots=SLOTS)
    answer(desk)
    assert desk.state.mode == "gathering"
    successor = desk.seats()[1]
    assert connect(desk, {1: b"b"}) == ()
    assert successor in desk.killed()


def test_a_later_worker_must_hold_what_the_first_one_held() -> None:
    desk = sharded()
    desk.lose("w1-1", n=1, slots=SLOTS)
    answer(desk)
    report(desk, desk.seats()[1], b"a")
    result = desk.state.ending.result
    assert result is not None and result.outcome == "user_error"
    assert result.cause is not None and "rank 1 holds other shards" in result.cause.detail


def test_a_later_term_knows_the_shards() -> None:
    desk = sharded()
    assert [e.shards for e in desk.journal() if isinstance(e, ShardsHeld)] == [*HYBRID]
    later = ControllerDriver(world=4, spares=2, term=2).begin(journal=desk.journal())
    assert later.state.shared.holdings == dict(enumerate(HYBRID))
