"""Every outcome of one vote, for two to four ranks: answers received, deaths, and pages written."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import product

import pytest
from tests.controller.controller_driver import ControllerDriver

from outlast.transport import messages

pytestmark = pytest.mark.sim
N = 5  # the vote is on this phase
BEFORE, AFTER, NEXT = f"before:{N - 1}", f"after:{N}", f"before:{N}"

# (alive, state or slots left, n): what one rank can be when the generation closes
ALL_VOTED = (
    (True, "idle", N),
    (True, "prepared", N - 1),
    (False, (BEFORE, AFTER), N - 1),
    (False, (BEFORE, AFTER), N),
    (False, (BEFORE, AFTER, NEXT), N),
)
NOT_ALL_VOTED = (
    (True, "running", N - 1),
    (True, "prepared", N - 1),
    (False, (BEFORE,), N - 1),
    (False, (BEFORE, AFTER), N - 1),
)


def fates(world: int) -> Iterator[tuple]:
    yield from product(ALL_VOTED, repeat=world)
    for fate in product(NOT_ALL_VOTED, repeat=world):
        if any(what == "running" or what == (BEFORE,) for _, what, _ in fate):
            yield fate


def opened(world: int) -> ControllerDriver:
    desk = ControllerDriver(world=world, spares=world).begin().open()
    for worker in desk.seats():
        desk.say(worker, messages.Recorded(seat=desk.seats().index(worker), record=worker.encode()))
    return desk


def close(desk: ControllerDriver, fate: tuple, order: list[int]) -> tuple[str, ...]:
    workers = desk.seats()
    for seat in order:
        alive, what, n = fate[seat]
        if alive:
            desk.status(workers[seat], n, what)
        else:
            desk.lose(workers[seat], n, slots={key: key.encode() for key in what})
    return workers


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("reverse", [False, True])
def test_every_outcome_around_one_vote(world: int, reverse: bool) -> None:
    start = opened(world)
    for fate in fates(world):
        desk = copy.copy(start)
        desk.history, desk._seqs = list(start.history), dict(start._seqs)
        order = list(range(world))[:: -1 if reverse else 1]
        old = close(desk, fate, order)
        survivors = {seat for seat in range(world) if fate[seat][0]}
        saw = {seat for seat in survivors if fate[seat][2] == N}
        decided = desk.decision()
        if not survivors:
            assert decided.generation == 2 and decided.verdict == "start" and decided.n == 0, fate
            continue
        n = N if saw else N - 1
        assert desk.state.mode == "gathering", fate
        assert (decided.generation, decided.n) == (2, n), fate
        assert decided.verdict == ("commit" if saw and saw != survivors else "redo"), fate
        told = {worker for worker, _ in desk.sent(messages.Decide, history=True)}
        assert told == {old[seat] for seat in survivors}, fate
        newcomers = set(range(world)) - survivors
        seated = {
            body.seat: body
            for _, body in desk.sent(messages.Seat, history=True)
            if body.generation == 2
        }
        assert set(seated) == newcomers, fate
        for seat, body in seated.items():
            assert body.n == n and {f"before:{n}", f"after:{n}"} & body.slots.keys(), fate
            assert all(int(key.split(":")[1]) == n for key in body.slots), fate
            assert body.record == old[seat].encode()
        desk.heal(n)
        assert desk.state.mode == "open" and desk.state.progress.n == n, fate
        assert {joiner for _, joiner in desk.state.progress.transfers} == newcomers
        assert {donor for donor, _ in desk.state.progress.transfers} <= survivors


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_second_failure_never_takes_a_commit_back(world: int) -> None:
    """Commit is decided; then those who had completed the phase die before the others apply it."""
    for saw in product((True, False), repeat=world):
        if all(saw) or not any(saw):
            continue
        desk = opened(world)
        workers = desk.seats()
        desk.say(workers[0], messages.Status(
            generation=1, n=N - (not saw[0]), step=N, state="idle" if saw[0] else "prepared",
        ))  # fmt: skip
        for seat in range(1, world):
            desk.status(workers[seat], N - (not saw[seat]), "idle" if saw[seat] else "prepared")
        assert desk.decision().verdict == "commit"
        for seat in range(world):
            if saw[seat]:
                desk.lose(workers[seat], N, slots={AFTER: b"x", NEXT: b"y"})
        for seat in range(world):
            if not saw[seat]:
                desk.status(workers[seat], N - 1, "prepared")
        decided = desk.decision()
        assert (decided.generation, decided.n, decided.verdict) == (3, N, "commit")
