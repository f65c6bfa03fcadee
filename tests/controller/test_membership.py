"""Membership turn by turn: frames sent, frames dropped, and the end of a run."""

from __future__ import annotations

from typing import Any

import pytest
from tests.controller.controller_driver import ControllerDriver

from outlast import errors, events
from outlast.transport import messages

SLOTS = {"before:5": b"b5", "after:5": b"a5", "result:5": b"r5", "before:4": b"b4"}
TRANSPORT = events.Fault(kind="transport", detail="connection reset")
RAISED = events.Fault(kind="raised", detail="ValueError", traceback="Traceback: ValueError")


def running(world: int = 2, spares: int = 1, **limits: Any) -> ControllerDriver:
    return ControllerDriver(world=world, spares=spares, **limits).begin().open()


def recover(desk: ControllerDriver, n: int) -> None:
    desk.heal(n)
    assert desk.state.mode == "open"


# --- the undisturbed run -----------------------------------------------------------------


def test_a_run_from_first_to_last_frame() -> None:
    desk = ControllerDriver(world=2, spares=1).begin()
    desk.agent()
    assert [body.seat for _, body in desk.sent(messages.Spawn)] == [0, 1, -1]
    desk.hello("w1-0")
    assert not desk.sent(messages.Seat)
    desk.hello("w1-1")
    assert all(body.first and body.n == 0 for _, body in desk.sent(messages.Seat))
    assert len(desk.sent(messages.Seat)) == 2
    desk.heal(0)
    assert desk.sent(messages.Open)[0][1] == messages.Open(generation=1, n=0)
    desk.hello("w1-2")
    for worker in desk.seats():
        desk.say(worker, messages.Finished(n=9))
    assert {worker for worker, body in desk.sent(messages.Stop) if body.ok} == {
        "w1-0",
        "w1-1",
        "w1-2",
    }
    for worker in ("w1-0", "w1-1", "w1-2"):
        desk.lose(worker, 9, "finished", kind="exited", detail="exit 0")
    end = desk.end()
    assert end is not None and (end.outcome, end.exit_code, end.n) == ("done", errors.EXIT_DONE, 9)


def test_spares_that_never_said_hello_are_killed_at_the_end() -> None:
    desk = running()
    desk.lose("w1-2", state="waiting")  # it was warm; the one in its place is cold
    for worker in desk.seats():
        desk.say(worker, messages.Finished(n=9))
    cold = [w.name for w in desk.state.members.workers.values() if w.hello is None]
    assert cold and set(cold) <= desk.killed()


def test_capacity_is_respected_and_a_second_agent_fills_up() -> None:
    desk = ControllerDriver(world=3, spares=0).begin()
    desk.agent(capacity=2)
    assert len(desk.sent(messages.Spawn)) == 2
    desk.agent(capacity=1, agent="b")
    assert [body.seat for _, body in desk.sent(messages.Spawn)] == [2]


def test_no_room_for_a_rank_ends_the_run_with_a_cause() -> None:
    desk = ControllerDriver(world=2, spares=0, hello_s=5).begin()
    desk.agent(capacity=1)
    desk.hello("w1-0")
    for _ in range(6):
        desk.say("", messages.Renew())
        desk.tick(1)
    desk.lose("w1-0")
    end = desk.end()
    assert end is not None and end.outcome == "gave_up"
    assert end.cause is not None and "room" in end.cause.detail


# --- a failure ----------------------------------------------------------------------------


def test_a_spare_takes_the_seat_with_slots_record_and_a_donor() -> None:
    desk = running()
    desk.say("w1-1", messages.Recorded(seat=1, record=b"set-up"))
    desk.lose("w1-1", 5, slots=SLOTS)
    assert [worker for worker, _ in desk.sent(messages.Close)] == ["w1-0"]
    (noticed,) = desk.emitted(events.Noticed)
    assert (noticed.incident, noticed.generation, noticed.how) == (1, 1, "pidfd")
    desk.status("w1-0", 5, "running")
    (decided,) = desk.emitted(events.Decided)
    assert (decided.verdict, decided.rung, decided.n) == ("redo", "replace", 5)
    assert decided.replaced == ((1, "w1-1", "w1-2"),)
    ((worker, seat),) = desk.sent(messages.Seat)
    assert worker == "w1-2" and not seat.first and seat.record == b"set-up"
    assert seat.slots == {key: SLOTS[key] for key in ("before:5", "after:5", "result:5")}
    recover(desk, 5)
    assert desk.state.progress.transfers == ((0, 1),)
    (moved,) = desk.emitted(events.Transferred)
    assert (moved.donor, moved.joiner, moved.digest) == (0, 1, "d")
    assert [e.incident for e in desk.emitted(events.GenerationOpened)] == [1]
    assert not desk.sent(messages.Spawn)  # the redone step comes first, then the spare is made up
    desk.commit(6)
    assert [body.seat for _, body in desk.sent(messages.Spawn)] == [-1]
    desk.commit(7)
    assert not desk.sent(messages.Spawn)


def test_decisions_are_durable_before_anybody_hears_of_them() -> None:
    desk = running()
    desk.lose("w1-1", 5, slots=SLOTS)
    actions = desk.status("w1-0", 5, "running")
    kinds = [
        type(body).__name__ if (body := getattr(action, "body", None)) else type(action).__name__
        for action in actions
    ]
    assert kinds.index("AppendJournal") < min(kinds.index("Decide"), kinds.index("Seat"))


def test_joiners_are_spread_over_the_donors() -> None:
    desk = running(world=4, spares=2)
    desk.lose("w1-1", 5, slots=SLOTS)
    desk.lose("w1-2", 5, slots=SLOTS)
    for worker in ("w1-0", "w1-3"):
        desk.status(worker, 5, "running")
    recover(desk, 5)
    assert desk.state.progress.transfers == ((0, 1), (3, 2))


def test_without_a_spare_a_worker_is_started_anew() -> None:
    desk = running(spares=0)
    desk.lose("w1-1", 5, slots=SLOTS)
    desk.status("w1-0", 5, "running")
    assert desk.emitted(events.Decided)[0].rung == "respawn"
    ((_, spawn),) = desk.sent(messages.Spawn)
    assert not desk.sent(messages.Seat)
    desk.hello(spawn.worker)
    assert [worker for worker, _ in desk.sent(messages.Seat)] == [spawn.worker]


def test_all_alive_is_tried_again_and_the_same_bug_ends_the_run() -> None:
    desk = running(attempts_max=3)
    for attempt in range(1, 4):
        desk.status("w1-1", 0, "running", fault=RAISED)
        desk.status("w1-0", 0, "running")
        if attempt < 3:
            assert desk.emitted(events.Decided)[0].rung == "retry"
            recover(desk, 0)
    for worker in tuple(desk.state.members.workers):
        desk.lose(worker)
    end = desk.end()
    assert end is not None and end.outcome == "user_error"
    assert end.cause is not None and end.cause.traceback == RAISED.traceback


def test_progress_forgives_earlier_attempts() -> None:
    desk = running(attempts_max=2)
    for n in (1, 2, 3, 4):
        desk.status("w1-1", n, "running", fault=TRANSPORT)
        desk.status("w1-0", n, "running")
        recover(desk, n)


def test_a_failure_between_decision_and_open_closes_the_next_generation() -> None:
    desk = running(spares=2)
    desk.lose("w1-1", 5, slots=SLOTS)
    desk.status("w1-0", 5, "running")
    desk.lose("w1-2", 5, "dry")
    assert [body.generation for _, body in desk.sent(messages.Close)] == [2]
    assert {event.incident for event in desk.emitted(events.Noticed)} == {1}
    desk.status("w1-0", 5, "idle")
    ((worker, seat),) = desk.sent(messages.Seat)
    assert worker == "w1-3" and seat.slots["before:5"] == b"b5" and seat.generation == 3
    recover(desk, 5)


def test_a_joiner_without_its_state_is_no_donor_and_gets_it_again() -> None:
    desk = running(world=3, spares=1)
    desk.lose("w1-2", 5, slots=SLOTS)
    for worker in ("w1-0", "w1-1"):
        desk.status(worker, 5, "running")
    recover(desk, 5)
    # Open was sent, but the joiner had not swapped in when the generation closed.
    desk.status("w1-0", 5, "running", fault=TRANSPORT)
    desk.status("w1-1", 5, "running")
    desk.status("w1-3", 5, "joining")
    desk.heal(5)
    assert desk.state.progress.transfers == ((0, 2),)


def test_a_state_that_did_not_arrive_costs_the_joiner_only() -> None:
    desk = running()
    desk.lose("w1-1", 5, slots=SLOTS)
    desk.status("w1-0", 5, "running")
    desk.heal(5, digest="other")
    assert desk.killed() == {"w1-2"}
    assert desk.emitted(events.Noticed)[0].fault.kind == "transfer"
    assert desk.state.mode == "closing"


@pytest.mark.parametrize("state", ["torn", "broken"])
def test_torn_and_broken_are_killed_and_reaped_before_the_decision(state: str) -> None:
    desk = running()
    desk.status("w1-1", 4, state, fault=events.Fault(kind="torn", detail="half applied"))
    desk.status("w1-0", 5, "idle")
    assert desk.killed() == {"w1-1"} and desk.state.mode == "closing"
    desk.lose("w1-1", 4, "applying", slots=SLOTS)
    assert desk.decision().n == 5 and desk.state.mode == "gathering"
    assert "w1-1" not in desk.seats()


def test_broken_counts_after_the_decision_too() -> None:
    desk = running()
    desk.status("w1-1", 5, "running", fault=TRANSPORT)
    desk.status("w1-0", 5, "running")
    desk.say("w1-1", messages.Status(generation=1, n=5, step=5, state="broken"))
    assert desk.killed() == {"w1-1"} and desk.state.mode == "closing"


def test_the_silent_are_fenced_and_their_end_is_awaited() -> None:
    desk = running(status_s=2)
    desk.status("w1-0", 5, "running", fault=TRANSPORT)
    desk.tick(1.5)
    assert not desk.killed()
    desk.tick(1)
    assert desk.killed() == {"w1-1"} and desk.state.mode == "closing"
    desk.lose("w1-1", 5, slots=SLOTS)
    assert desk.state.mode == "gathering"


def test_contradicting_answers_stop_the_run_and_say_why() -> None:
    desk = running()
    desk.status("w1-0", 5, "idle", fault=TRANSPORT)
    desk.status("w1-1", 4, "running")
    assert desk.state.mode == "stopping"
    for worker in tuple(desk.state.members.workers):
        desk.lose(worker)
    end = desk.end()
    assert end is not None and end.outcome == "gave_up"
    assert end.cause is not None and "contradict" in end.cause.detail


def test_an_answer_that_changes_costs_the_worker() -> None:
    desk = running(world=3)
    desk.status("w1-0", 5, "running", fault=TRANSPORT)
    desk.status("w1-0", 6, "idle")
    assert desk.killed() == {"w1-0"}


def test_nobody_is_blamed_for_a_lost_message() -> None:
    desk = running()
    desk.say("", messages.Suspect(worker="", fault=TRANSPORT))
    assert len(desk.sent(messages.Close)) == 2 and not desk.killed()


def test_a_suspect_is_killed_and_its_reason_is_what_is_told() -> None:
    desk = running()
    desk.say("", messages.Suspect(worker="w1-1", fault=events.Fault(kind="hung", detail="stuck")))
    assert desk.killed() == {"w1-1"}
    desk.lose("w1-1", 5, slots=SLOTS)
    assert desk.emitted(events.WorkerLost)[0].fault.kind == "hung"
    assert len(desk.emitted(events.Noticed, history=True)) == 1


def test_who_is_late_to_be_ready_is_given_up() -> None:
    desk = running(join_s=5, hang_floor_s=1, hang_ceiling_s=5)
    desk.status("w1-0", 5, "running", fault=TRANSPORT)
    desk.status("w1-1", 5, "running")
    desk.say("w1-0", messages.WorkerReady(generation=2, n=5))
    desk.say("", messages.Renew())
    desk.tick(6)
    assert desk.killed() == {"w1-1"}


def test_a_survivor_that_stands_in_its_script_is_given_the_ceiling_to_be_ready() -> None:
    desk = running(join_s=5, lease_s=1000, hang_ceiling_s=60)
    desk.status("w1-0", 5, "running", fault=TRANSPORT)
    desk.status("w1-1", 5, "running")
    desk.say("w1-0", messages.WorkerReady(generation=2, n=5))
    desk.tick(59)
    assert not desk.killed()
    desk.tick(2)
    assert desk.killed() == {"w1-1"}


def test_who_cannot_answer_because_its_interpreter_is_held_has_the_ceiling() -> None:
    desk = running(world=3, status_s=5, lease_s=1000, hang_ceiling_s=60)
    desk.status("w1-0", 5, "running", fault=TRANSPORT)
    desk.say("", messages.Renew(beats={"w1-1": (5, 5, "running", 0.0)}, blocked=("w1-1",)))
    desk.tick(6)
    assert desk.killed() == {"w1-2"}
    desk.tick(53)
    assert desk.killed() == {"w1-2"}
    desk.tick(2)
    assert desk.killed() == {"w1-1", "w1-2"}


def test_who_applies_a_won_phase_has_answered_and_is_waited_for() -> None:
    """It stands in the script behind `optimizer.step()`: nobody is fenced for that."""
    desk = running(lease_s=1000)
    desk.status("w1-0", 6, "applying", fault=TRANSPORT)
    desk.status("w1-1", 5, "prepared")
    decided = desk.decision()
    assert (decided.verdict, decided.n) == ("commit", 6)
    desk.tick(300)
    assert not desk.killed()
    desk.say("w1-0", messages.WorkerReady(generation=2, n=6))
    desk.say("w1-1", messages.WorkerReady(generation=2, n=6))
    assert desk.state.mode == "connecting"


def test_a_won_phase_that_cannot_be_applied_is_torn_after_all() -> None:
    desk = running(spares=1)
    desk.status("w1-0", 6, "applying", fault=TRANSPORT)
    desk.status("w1-1", 6, "idle")
    desk.status("w1-0", 6, "torn")
    assert desk.killed() == {"w1-0"}
    desk.lose("w1-0", 5, slots={"after:6": b"x"})
    assert desk.decision().n == 6 and desk.state.members.seats[0] != "w1-0"


def test_a_late_connection_is_tried_again_without_blame() -> None:
    desk = running(connect_s=3)
    desk.status("w1-0", 5, "running", fault=TRANSPORT)
    desk.status("w1-1", 5, "running")
    for worker in desk.seats():
        desk.say(worker, messages.WorkerReady(generation=2, n=5))
    desk.tick(4)
    assert [body.generation for _, body in desk.sent(messages.Close)] == [2, 2]
    assert not desk.killed()


def test_a_joiner_that_stands_elsewhere_is_replaced_before_the_decision() -> None:
    desk = running(spares=2)
    desk.lose("w1-1", 5, slots=SLOTS)
    desk.status("w1-0", 5, "running")
    desk.status("w1-2", 3, "joining", fault=TRANSPORT)
    desk.status("w1-0", 5, "idle")
    assert desk.killed() == {"w1-2"} and desk.state.mode == "closing"
    desk.lose("w1-2", 3)
    assert desk.state.mode == "gathering" and desk.seats() == ("w1-0", "w1-3")


@pytest.mark.parametrize("code", [0, 17])
def test_a_script_that_ends_early_with_an_exit_code_has_that_code_as_its_cause(code: int) -> None:
    desk = running()
    desk.say("w1-1", messages.Finished(n=5, step=5, exit_code=code))
    left = events.Fault(kind="contract", detail="every rank must make the same calls")
    desk.say("", messages.Suspect(worker="w1-1", fault=left))
    (noticed,) = desk.emitted(events.Noticed, history=True)
    assert desk.killed() == {"w1-1"}
    assert noticed.fault.kind == ("exited" if code else "contract")
    assert noticed.fault.exit_code == code
