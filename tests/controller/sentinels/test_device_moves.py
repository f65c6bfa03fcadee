"""Moves of ranks whose numbers were not finite twice, and what stands against them."""

from __future__ import annotations

import pytest
from tests.controller.controller_driver import ControllerDriver

from outlast import events
from outlast.controller.recovery.recovery_policy import DEFAULT, plain_rules
from outlast.transport import messages

DETAIL = "the gradient of w is not finite on every rank; rank 1 brought it"


def fault(*, repeats: bool = False) -> events.Fault:
    return events.Fault(kind="nonfinite", detail=DETAIL, repeats=repeats)


def job(world: int = 3, spares: int = 1) -> ControllerDriver:
    """Return a run of equal ranks in its second phase."""
    desk = ControllerDriver(world=world, spares=spares).begin().open()
    desk.commit(1)
    return desk


def recovered(desk: ControllerDriver, *given_up: str) -> events.Decided:
    """Let the agent kill whom it was told to, and the others answer."""
    generation = desk.state.generation
    for worker in given_up:
        desk.lose(worker, 1, slots={"before:1": b"own"}, kind="requested", detail="killed")
    for worker in desk.seats():
        if worker and desk.state.generation == generation and worker not in given_up:
            desk.status(worker, 1, "running")
    (decided,) = desk.emitted(events.Decided, history=True)
    return decided


def test_a_rank_that_asks_for_another_device_moves_to_a_spare() -> None:
    desk = job()
    desk.status("w1-1", 1, "running", fault())
    assert desk.killed() == {"w1-1"}
    decided = recovered(desk, "w1-1")
    assert (decided.rung, decided.n) == ("migrate", 1)
    assert decided.replaced == ((1, "w1-1", "w1-3"),)
    assert (
        "nonfinite" in decided.reason and decided.rule == "policy default, nonfinite, rung 2 of 8"
    )


def test_two_ranks_and_one_spare_move_one() -> None:
    desk = job()
    desk.status("w1-1", 1, "running", fault())
    desk.status("w1-2", 1, "running", fault())
    assert desk.killed() == {"w1-1"}


def test_without_a_spare_the_phase_is_retried_and_nobody_is_given_up() -> None:
    desk = job(spares=0)
    desk.status("w1-1", 1, "running", fault())
    assert not desk.killed()
    assert recovered(desk).rung == "retry"
    notes = [note.text for note in desk.emitted(events.Note, history=True)]
    assert "rank 1 does not try another device: no warm spare has another device" in notes


def test_a_spare_on_the_same_gpus_is_no_other_device() -> None:
    desk = ControllerDriver(world=2, spares=1).begin()
    desk.agent()
    for worker in list(desk.state.members.workers):
        body = messages.WorkerHello(pid=1, fingerprint={}, address=f"{worker}:1", devices=2)
        desk.say(worker, body)
    desk.heal(0)
    desk.commit(1)
    desk.status("w1-1", 1, "running", fault())
    assert not desk.killed()


@pytest.mark.parametrize("rungs", [("retry", "stop"), ("respawn", "restart", "stop")])
def test_a_policy_without_a_move_moves_nobody(rungs: tuple[str, ...]) -> None:
    desk = job()
    classes = {"nonfinite": plain_rules(*rungs)}  # pyright: ignore[reportArgumentType]
    desk.state.recovery = type(DEFAULT)(name="own", default=DEFAULT.default, classes=classes)
    desk.status("w1-1", 1, "running", fault())
    assert not desk.killed()


def test_a_fault_that_would_come_again_stops_the_run_with_its_cause() -> None:
    desk = job()
    desk.status("w1-1", 1, "running", fault(repeats=True))
    assert not desk.killed()
    decided = recovered(desk)
    assert (decided.rung, decided.reason) == ("stop", DETAIL)
    for worker in list(desk.state.members.workers):
        desk.lose(worker, 1)
    end = desk.end()
    assert end is not None and end.outcome == "user_error"
    assert end.cause is not None and end.cause.kind == "nonfinite"


def test_the_cause_of_a_stop_is_the_last_report_and_not_the_move_before_it() -> None:
    desk = job()
    desk.status("w1-1", 1, "running", fault())
    recovered(desk, "w1-1")
    desk.heal(1)
    last = events.Fault(kind="nonfinite", detail="also elsewhere", repeats=True)
    desk.status("w1-3", 1, "running", last)
    for worker in ("w1-0", "w1-2"):
        desk.status(worker, 1, "running")
    assert desk.emitted(events.Decided, history=True)[-1].reason == "also elsewhere"


def test_an_exception_of_the_script_moves_nobody_and_leads_to_a_retry() -> None:
    desk = job()
    raised = events.Fault(kind="nonfinite", detail="raised", traceback="RuntimeError: no")
    desk.status("w1-1", 1, "running", raised)
    assert not desk.killed()
    assert recovered(desk).rung == "retry"


def test_a_move_long_after_an_earlier_incident_is_at_its_own_step() -> None:
    desk = job(spares=2)
    desk.status("w1-1", 1, "running", fault())
    recovered(desk, "w1-1")
    desk.heal(1)
    desk.commit(9)
    late = events.Fault(kind="nonfinite", detail=DETAIL, n=9, step=10, state="running")
    desk.status("w1-2", 9, "running", late)
    noticed = desk.emitted(events.Noticed, history=True)[-1].fault
    assert (noticed.seat, noticed.n, noticed.step) == (2, 9, 10)
