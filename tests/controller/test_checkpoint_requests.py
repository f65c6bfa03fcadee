"""Checkpoints on request: all ranks save at one step, with retries until it is complete."""

from __future__ import annotations

from tests.controller.controller_driver import ControllerDriver

from outlast import events
from outlast.controller.inputs import SaveRequested
from outlast.controller.save_schedule.save_tiers import SavePolicy
from outlast.transport import messages


def asked(desk: ControllerDriver) -> ControllerDriver:
    desk.history.clear()
    desk.feed(SaveRequested(t_ns=desk.now_ns, reason="SIGUSR1"))
    return desk


def recover(desk: ControllerDriver, n: int) -> None:
    for name in desk.seats():
        desk.status(name, n, "idle")
    desk.heal(n)


def asks(desk: ControllerDriver) -> list[str]:
    return [body.ask for _, body in desk.sent(messages.Open, history=True)]


def test_the_next_generation_saves_and_goes_on() -> None:
    desk = asked(ControllerDriver(world=2, spares=0).begin().open())
    assert desk.state.mode == "closing"
    recover(desk, 5)
    assert asks(desk) == ["save", "save"] and desk.state.mode == "open"
    (decided,) = desk.emitted(events.Decided, history=True)
    assert decided.rung == "retry"


def broken(desk: ControllerDriver, n: int) -> ControllerDriver:
    """A connection breaks."""
    desk.history.clear()
    desk.status("w1-0", n, "idle", events.Fault(kind="transport", detail="cut"))
    assert desk.state.mode == "closing"
    return desk


def test_a_save_is_asked_again_until_its_phase_is_complete() -> None:
    desk = asked(ControllerDriver(world=2, spares=0).begin().open())
    recover(desk, 5)
    recover(broken(desk, 5), 5)
    assert asks(desk) == ["save", "save"]
    recover(broken(desk, 6), 6)  # the save was phase 6, and somebody has it
    assert asks(desk) == ["", ""]


def test_one_request_at_a_time_and_none_in_the_end() -> None:
    desk = asked(ControllerDriver(world=2, spares=0).begin().open())
    asked(desk)
    assert not desk.emitted(events.Noticed)
    recover(desk, 5)
    desk.stop()
    recover(desk, 6)
    desk.history.clear()
    desk.feed(SaveRequested(t_ns=desk.now_ns, reason="too late"))
    assert desk.state.mode == "open" and desk.sent(messages.Close, history=True) == []


FAILED = messages.SaveFailed(n=6, step=6, error="rank 1: No space left on device")


def test_a_failed_save_is_said_and_the_run_goes_on() -> None:
    desk = ControllerDriver(world=2, spares=0).begin().open()
    desk.say("w1-0", FAILED)
    (note,) = desk.emitted(events.Note)
    assert "step 6 failed: rank 1: No space left" in note.text and note.level == "warning"
    assert desk.state.mode == "open"


def test_a_failed_save_ends_the_run_where_its_owner_wants_that() -> None:
    desk = ControllerDriver(world=2, spares=0, policy=SavePolicy(stop=True)).begin().open()
    desk.say("w1-0", FAILED)
    assert desk.killed() == {"w1-0", "w1-1"}
    for name in ("w1-0", "w1-1"):
        desk.lose(name, 6)
    end = desk.end()
    assert end is not None and end.cause is not None
    assert (end.outcome, end.exit_code, end.cause.kind) == ("gave_up", 3, "storage")
    assert "No space left" in end.cause.detail and "then resume with" in end.cause.detail


def test_a_failed_save_changes_no_end_that_has_begun() -> None:
    desk = ControllerDriver(world=2, spares=0, policy=SavePolicy(stop=True)).begin().open()
    desk.stop()
    desk.stop()
    assert desk.state.mode == "stopping"
    desk.say("w1-0", FAILED)
    for name in ("w1-0", "w1-1"):
        desk.lose(name, 6)
    end = desk.end()
    assert end is not None and end.outcome == "interrupted"


def test_a_save_that_fails_in_a_drain_is_not_said_to_go_on() -> None:
    desk = ControllerDriver(world=2, spares=0).begin().open()
    saved = messages.Checkpointed(n=3, step=3, path="step-000000003-n3-t1g1")
    desk.say("w1-0", saved)
    desk.stop()
    recover(desk, 5)
    desk.say("w1-0", FAILED)
    (note,) = desk.emitted(events.Note)
    assert note.text.endswith("the run ends, and resumes from the checkpoint of step 3")
