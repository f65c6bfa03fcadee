"""Spares: made up to their number, unless they keep dying."""

from __future__ import annotations

from typing import Any

import pytest

from outlast import events, wire
from outlast.testing.desk import Desk


def running(spares: int = 1, **limits: Any) -> Desk:
    return Desk(world=2, spares=spares, **limits).begin().open()


def notes(desk: Desk) -> str:
    return " ".join(note.text for note in desk.emitted(events.Note))


@pytest.mark.parametrize("lived_s", [1, 700])
def test_a_lost_spare_is_replaced_at_once(lived_s: int) -> None:
    desk = running(lease_s=1000)
    desk.tick(lived_s)
    desk.lose("w1-2", state="waiting")
    assert [body.seat for _, body in desk.sent(wire.Spawn)] == [-1]
    assert "spare w1-2 is lost" in notes(desk) and "another is started" in notes(desk)
    assert desk.state.mode == "open" and desk.state.respawns == 1


@pytest.mark.parametrize("warm", [True, False])
def test_spares_that_keep_dying_young_are_not_replaced_for_ever(warm: bool) -> None:
    desk = running(attempts_max=3)
    for number in range(2, 5):
        if warm and number > 2:
            desk.hello(f"w1-{number}")
        desk.lose(f"w1-{number}", state="waiting")
    assert not desk.sent(wire.Spawn)
    assert "no other is started before the next recovery, since 3 in a row" in notes(desk)
    desk.status("w1-0", 0, "idle", fault=events.Fault(kind="transport", detail="reset"))
    desk.status("w1-1", 0, "idle")
    desk.heal(0)
    assert [body.seat for _, body in desk.sent(wire.Spawn)] == [-1]


def test_long_lives_are_not_counted_together() -> None:
    desk = running(attempts_max=2, lease_s=1e6)
    for number in range(2, 9):
        desk.hello(f"w1-{number}")
        desk.tick(700)
        desk.lose(f"w1-{number}", state="waiting")
        assert desk.sent(wire.Spawn), number


def test_a_spare_that_was_given_up_is_replaced_when_it_is_reaped() -> None:
    desk = running(hello_s=5, lease_s=1000)
    desk.lose("w1-2", state="waiting")
    desk.tick(6)
    assert desk.killed() == {"w1-3"}
    desk.lose("w1-3", state="starting", kind="requested", detail="killed by its agent")
    assert [body.seat for _, body in desk.sent(wire.Spawn)] == [-1]
    assert desk.state.spares_failed == 2


def test_a_run_that_drains_starts_no_spares() -> None:
    desk = running()
    desk.stop()
    for worker in desk.seats():
        desk.status(worker, 7, "idle")
    desk.heal(7)
    desk.history.clear()
    desk.lose("w1-2", state="waiting")
    assert not desk.sent(wire.Spawn, history=True)
