"""Place from which a lost shard is rebuilt: a copy in memory, and a step taken back."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.controller.controller_driver import ControllerDriver

from outlast import events
from outlast.controller.inputs import AnyEntry, DecisionMade
from outlast.transport import messages

ALONE = (b"a", b"b", b"c")


def copy(step: int, path: str = "") -> messages.Checkpointed:
    path = path or f"step-{step}"
    return messages.Checkpointed(n=step - 1, step=step, path=path, tier="memory")


def lost(n: int, *slots: str) -> ControllerDriver:
    """A run in which no rank has a replica; rank 1 is lost after n phases of the others."""
    desk = ControllerDriver(world=3, spares=1).begin().open()
    for worker, held in zip(desk.seats(), ALONE, strict=True):
        desk.say(worker, messages.StateProtected(schema="s", summary="", shards=held))
    desk.commit(n)
    desk.lose("w1-1", n=n - 1, slots=dict.fromkeys(slots, b"own"))
    return desk


def answer(desk: ControllerDriver, seat: int, n: int, state: str, **more: Any) -> None:
    generation = desk.state.generation
    body = messages.Status(generation=generation, n=n, step=n, state=state, **more)
    desk.say(f"w1-{seat}", body)


def decided(desk: ControllerDriver) -> events.Decided:
    return desk.emitted(events.Decided, history=True)[-1]


def test_a_copy_of_the_last_step_is_the_base() -> None:
    desk = lost(4, "before:4")
    answer(desk, 0, 4, "running", copy=copy(4))
    answer(desk, 2, 4, "idle", copy=copy(4))
    found = decided(desk)
    assert (found.rung, found.verdict, found.n, found.step) == ("rebuild", "redo", 4, 4)
    assert desk.decision().copy == copy(4)


def test_a_step_that_all_can_take_back_is_redone() -> None:
    desk = lost(4, "before:3")
    answer(desk, 0, 4, "applying", copy=copy(3), redoable=True)
    answer(desk, 2, 3, "prepared", copy=copy(3))
    found = decided(desk)
    assert (found.rung, found.verdict, found.n, found.step) == ("rebuild", "redo", 3, 3)
    assert desk.decision().copy == copy(3)


def test_a_step_that_one_rank_cannot_take_back_is_not() -> None:
    desk = lost(4, "before:3", "after:4")
    answer(desk, 0, 4, "idle", copy=copy(3), redoable=True)
    answer(desk, 2, 4, "idle", copy=copy(3))
    found = decided(desk)
    assert found.rung == "restart"
    assert "step 4 is committed on a rank that cannot take it back" in found.reason


def test_ranks_take_a_step_back_to_one_copy() -> None:
    desk = lost(4, "before:3")
    answer(desk, 0, 4, "idle", copy=copy(3), redoable=True)
    answer(desk, 2, 4, "idle", copy=copy(3, "another"), redoable=True)
    assert decided(desk).rung == "restart"


def test_without_the_lost_ranks_own_state_nothing_is_rebuilt() -> None:
    desk = lost(4, "before:4")
    answer(desk, 0, 4, "idle", copy=copy(3), redoable=True)
    answer(desk, 2, 4, "idle", copy=copy(3), redoable=True)
    assert decided(desk).rung == "restart"


def test_a_journal_of_before_rebuilds_has_decisions_without_a_copy() -> None:
    desk = lost(4, "before:4")
    answer(desk, 0, 4, "idle", copy=copy(4))
    answer(desk, 2, 4, "idle", copy=copy(4))
    journal = [_as_before(entry) for entry in desk.journal()]
    decisions = [entry for entry in journal if isinstance(entry, DecisionMade)]
    assert decisions[-1].n == 4 and decisions[-1].copy is None
    later = ControllerDriver(world=3, spares=1, term=2).begin(journal=tuple(journal))
    assert later.state.progress.base is None and not later.state.progress.rebuilds
    now = ControllerDriver(world=3, spares=1, term=2).begin(journal=desk.journal())
    assert now.state.progress.base == copy(4) and now.state.progress.rebuilds


def _as_before(entry: Any) -> AnyEntry:
    """Return an entry as an older version wrote and this one reads it."""
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(entry))
    fields.pop("copy", None)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=AnyEntry)
