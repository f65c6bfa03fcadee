"""Restarts and ends of runs, differences between ranks, and shared values."""

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


# --- restart and stop ---------------------------------------------------------------------


def test_when_all_are_gone_everybody_starts_from_the_newest_checkpoint() -> None:
    desk = running(spares=1)
    point = messages.Checkpointed(n=4, step=3, path="ck/4")
    desk.say("w1-0", point)
    desk.say("", messages.Renew(beats={"w1-0": (6, 5, "running", 0.0)}))
    desk.lose("w1-0", 6)
    desk.lose("w1-1", 6)
    (decided,) = desk.emitted(events.Decided)
    assert decided.rung == "restart" and "all redo: 2" in decided.reason
    spawned = [body for _, body in desk.sent(messages.Spawn)]
    assert [body.seat for body in spawned] == [1, -1]  # the warm spare takes the other seat
    desk.hello(spawned[0].worker)
    seats = [body for _, body in desk.sent(messages.Seat)]
    assert [(b.first, b.n, b.checkpoint, b.generation) for b in seats] == [(True, 4, point, 2)] * 2


def test_a_restart_waits_until_the_survivors_are_reaped() -> None:
    desk = running(spares=0)
    desk.lose("w1-1", 5, slots={})
    desk.status("w1-0", 5, "running")
    assert desk.state.mode == "clearing" and desk.killed() == {"w1-0"}
    assert not desk.sent(messages.Spawn)
    desk.lose("w1-0", 5)
    assert len(desk.sent(messages.Spawn)) == 2


def test_restarts_that_get_nowhere_end() -> None:
    desk = running(spares=0, attempts_max=2)
    for _ in range(4):
        for worker in desk.seats():
            if worker:
                desk.lose(worker, 3)
        if desk.state.mode == "ended":
            break
        for worker in tuple(desk.state.members.workers):
            desk.hello(worker)
        desk.heal(0)
    end = desk.end()
    assert end is not None and end.outcome == "gave_up"


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ({"signal": 11}, "gave_up"),
        ({"kind": "hung"}, "gave_up"),
        ({"kind": "exited", "exit_code": 1, "traceback": "T"}, "user_error"),
        ({"kind": "exited", "exit_code": 0}, "user_error"),
    ],
)
def test_a_death_before_the_first_step_ends_the_run_at_once(
    fault: dict[str, Any], outcome: str
) -> None:
    desk = running()
    desk.lose("w1-1", 0, "setup", **fault)
    assert desk.state.mode == "stopping" and not desk.sent(messages.Spawn)
    for worker in tuple(desk.state.members.workers):
        desk.lose(worker)
    end = desk.end()
    assert end is not None and end.outcome == outcome
    assert end.cause is not None and "before its first step" in end.cause.detail


ACCIDENTS: list[dict[str, Any]] = [{"signal": 9}, {"kind": "stopped"}, {"kind": "agent_lost"}]


@pytest.mark.parametrize("fault", ACCIDENTS)
def test_an_accident_before_init_leaves_the_others_starting(fault: dict[str, Any]) -> None:
    desk = ControllerDriver(world=2, spares=1).begin()
    desk.agent()
    desk.hello("w1-0")
    desk.lose("w1-1", 0, "starting", **fault)
    assert desk.end() is None and not desk.killed()
    assert desk.seats() == ("w1-0", "w1-2")  # the spare, which is on its way
    desk.hello("w1-2")
    desk.heal(0)
    assert desk.state.mode == "open" and desk.state.generation == 1


@pytest.mark.parametrize("fault", ACCIDENTS)
def test_an_accident_in_set_up_starts_everybody_again(fault: dict[str, Any]) -> None:
    desk = running()
    desk.lose("w1-1", 0, "setup", **fault)
    desk.status("w1-0", 0, "broken")
    desk.lose("w1-0", 0, "setup", kind="requested")
    assert desk.end() is None and desk.state.mode == "gathering" and desk.state.progress.first
    decided = desk.emitted(events.Decided, history=True)[-1]
    assert decided.rung == "restart" and "all redo: 0" in decided.reason


def test_accidents_before_init_at_one_seat_end_the_run_within_its_budgets() -> None:
    desk = ControllerDriver(world=2, spares=0, attempts_max=3).begin()
    desk.agent()
    deaths = 0
    while desk.end() is None and deaths < 200:
        for name in tuple(desk.state.members.workers):
            worker = desk.state.members.workers.get(name)
            if worker is None:
                continue
            if worker.killed_ns or worker.seat == 1:
                deaths += not worker.killed_ns
                desk.lose(name, 0, "starting", signal=9)
            elif worker.hello is None:
                desk.hello(name)
    end = desk.end()
    assert end is not None and end.outcome == "gave_up" and end.cause is not None
    assert end.cause.kind == "killed" and end.cause.seat == 1
    assert 3 < deaths <= 20


def test_a_broken_connection_in_set_up_starts_everybody_again() -> None:
    desk = running()
    desk.status("w1-1", 0, "broken", fault=TRANSPORT)
    desk.status("w1-0", 0, "broken")
    for worker in ("w1-0", "w1-1"):
        desk.lose(worker, 0, "setup")
    assert (
        desk.state.mode == "gathering"
        and desk.state.progress.first
        and desk.state.budgets.attempts == {"transport": 1}
    )


def test_a_drain_ends_interrupted_when_all_have_finished() -> None:
    desk = running()
    desk.stop()
    for worker in desk.seats():
        desk.status(worker, 7, "idle")
    recover(desk, 7)
    assert [body.ask for _, body in desk.sent(messages.Open)][-2:] == ["drain", "drain"]
    for worker in desk.seats():
        desk.say(worker, messages.Finished(n=7))
    assert not any(body.ok for _, body in desk.sent(messages.Stop))
    for worker in tuple(desk.state.members.workers):
        desk.lose(worker, 7, "finished")
    end = desk.end()
    assert end is not None
    assert (end.outcome, end.exit_code) == ("interrupted", errors.EXIT_INTERRUPTED)


def test_sigkill_has_its_own_time_to_take_effect() -> None:
    desk = running(stop_s=0.5, kill_s=5)
    desk.stop()
    desk.tick(1)
    assert desk.killed() == {"w1-0", "w1-1", "w1-2"}
    desk.tick(4)
    assert desk.end() is None
    for worker in tuple(desk.state.members.workers):
        desk.lose(worker, 7, "running")
    end = desk.end()
    assert end is not None and end.outcome == "interrupted"
    assert not any("could not be killed" in n.text for n in desk.emitted(events.Note, history=True))


@pytest.mark.parametrize("how", ["finished", "lost"])
def test_the_end_tells_phase_and_step_of_one_moment(how: str) -> None:
    desk = running()
    desk.say("", messages.Renew(beats={"w1-0": (6, 4, "running", 0.0)}))
    if how == "finished":
        for worker in desk.seats():
            desk.say(worker, messages.Finished(n=9, step=6))
    else:
        fault = events.Fault(kind="killed", detail="")
        body = messages.WorkerLostReport(worker="w1-1", fault=fault, n=9, step=6, state="idle")
        desk.say("", body)
        desk.stop()
        desk.stop()
    for worker in tuple(desk.state.members.workers):
        desk.lose(worker, -1)
    end = desk.end()
    assert end is not None and (end.n, end.step) == (9, 6)


def test_a_seat_that_nobody_has_taken_yet_gave_way_to_nobody() -> None:
    desk = running(spares=0)
    desk.lose("w1-0", 6)
    desk.lose("w1-1", 6)
    (decided,) = desk.emitted(events.Decided)
    assert decided.rung == "restart" and decided.replaced == ()


@pytest.mark.parametrize("how", ["twice", "late"])
def test_a_stop_that_cannot_wait_kills(how: str) -> None:
    desk = running(stop_s=5)
    desk.stop()
    if how == "twice":
        desk.stop()
    elif how == "late":
        desk.tick(6)
    assert desk.killed() == {"w1-0", "w1-1", "w1-2"}


def test_a_drain_goes_on_after_a_recovery() -> None:
    desk = running()
    desk.stop()
    desk.lose("w1-1", 5, slots=SLOTS)
    desk.status("w1-0", 5, "running")
    recover(desk, 5)
    assert {worker for worker, body in desk.sent(messages.Open) if body.ask == "drain"} == set(
        desk.seats()
    )


def test_a_bad_exit_after_all_have_finished_is_the_users_error() -> None:
    desk = running()
    for worker in desk.seats():
        desk.say(worker, messages.Finished(n=9))
    desk.lose("w1-0", 9, "finished", kind="exited", detail="exit 3", exit_code=3)
    for worker in ("w1-1", "w1-2"):
        desk.lose(worker, 9, "finished", kind="exited", detail="exit 0")
    end = desk.end()
    assert end is not None and end.outcome == "user_error"
    assert end.cause is not None and end.cause.exit_code == 3


def test_a_worker_that_cannot_be_killed_ends_the_run() -> None:
    desk = running(status_s=2, kill_s=3, lease_s=100)
    desk.status("w1-0", 5, "running", fault=TRANSPORT)
    for _ in range(25):
        desk.tick(1)
    end = desk.end()
    assert end is not None and end.cause is not None and "could not be killed" in end.cause.detail


# --- what differs -------------------------------------------------------------------------


def test_ranks_that_compute_differently_do_not_start() -> None:
    desk = ControllerDriver(world=2, spares=0).begin()
    desk.agent()
    desk.hello("w1-0", isa="avx2")
    desk.hello("w1-1", isa="avx512")
    assert desk.state.mode == "stopping" and desk.state.ending.result is not None
    assert desk.state.ending.result.outcome == "user_error"
    assert desk.state.ending.result.cause is not None and "isa: avx512 against avx2" in (
        desk.state.ending.result.cause.detail
    )


def test_a_spare_that_computes_differently_is_replaced() -> None:
    desk = ControllerDriver(world=1, spares=1).begin()
    desk.agent()
    desk.hello("w1-0", isa="avx2")
    desk.hello("w1-1", isa="avx512")
    assert desk.killed() == {"w1-1"}
    assert any("isa" in note.text for note in desk.emitted(events.Note))


def test_ranks_that_protect_different_things_stop_the_run() -> None:
    desk = running()
    desk.say("w1-0", messages.StateProtected(schema="x", summary="Linear(4, 4)"))
    desk.say("w1-1", messages.StateProtected(schema="y", summary="Linear(4, 5)"))
    assert desk.state.ending.result is not None and desk.state.ending.result.outcome == "user_error"
    cause = desk.state.ending.result.cause
    assert cause is not None and cause.kind == "mismatch"
    assert "Linear(4, 4)" in cause.detail and "Linear(4, 5)" in cause.detail


# --- values that pass through ---------------------------------------------------------------


def test_a_shared_value_is_made_once_and_kept_before_it_is_told() -> None:
    desk = running()
    desk.say("w1-0", messages.SharedValueRequest(name="id"))
    desk.say("w1-1", messages.SharedValueRequest(name="id"))
    assert [w for w, _ in desk.sent(messages.SharedValueMake, history=True)] == ["w1-0"]
    actions = desk.say("w1-0", messages.SharedValueMade(name="id", value=b"7"))
    assert type(actions[0]).__name__ == "AppendJournal"
    assert {w for w, _ in desk.sent(messages.SharedValueReply)} == {"w1-0", "w1-1"}
    desk.say("w1-1", messages.SharedValueMade(name="id", value=b"8"))
    desk.say("w1-1", messages.SharedValueRequest(name="id"))
    assert desk.sent(messages.SharedValueReply) == [
        ("w1-1", messages.SharedValueReply(name="id", value=b"7"))
    ]


def test_a_maker_that_lives_is_never_replaced() -> None:
    desk = running(shared_s=2, join_s=100, lease_s=1000)
    desk.say("w1-0", messages.SharedValueRequest(name="id"))
    for _ in range(20):
        desk.tick(4)
        desk.say("w1-1", messages.SharedValueRequest(name="id"))
    assert [w for w, _ in desk.sent(messages.SharedValueMake, history=True)] == ["w1-0"]
    desk.say("w1-0", messages.SharedValueRequest(name="id"))
    assert [w for w, _ in desk.sent(messages.SharedValueMake)] == ["w1-0"]  # its frame was lost
    assert not desk.killed()


def test_a_maker_that_is_dead_loses_its_turn() -> None:
    desk = running(world=3)
    desk.say("w1-0", messages.SharedValueRequest(name="id"))
    for worker in ("w1-1", "w1-2"):
        desk.say(worker, messages.SharedValueRequest(name="id"))
    desk.lose("w1-1", 0, slots=SLOTS)
    desk.lose("w1-0", 0, slots=SLOTS)
    assert [w for w, _ in desk.sent(messages.SharedValueMake)] == ["w1-2"]


def test_a_maker_that_never_ends_is_hung() -> None:
    desk = running(join_s=5, lease_s=1000)
    desk.say("w1-1", messages.SharedValueRequest(name="id"))
    desk.say("w1-0", messages.SharedValueRequest(name="id"))
    desk.tick(6)
    assert desk.killed() == {"w1-1"} and not desk.sent(messages.SharedValueMake)
    (noticed,) = desk.emitted(events.Noticed)
    assert noticed.fault.kind == "hung" and "'id'" in noticed.fault.detail
    desk.lose("w1-1", 1, slots=SLOTS)
    assert [w for w, _ in desk.sent(messages.SharedValueMake)] == ["w1-0"]
