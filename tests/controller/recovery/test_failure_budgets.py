"""Failure budgets: unrelated failures do not end a healthy run."""

from __future__ import annotations

from typing import Any

import pytest
from tests.controller.controller_driver import ControllerDriver, S

from outlast import events
from outlast.faults import HOST_MEMORY
from outlast.transport import messages

RAISED = events.Fault(kind="raised", detail="ValueError", traceback="Traceback\nValueError: x")
CRASH = {"kind": "exited", "exit_code": 1}


def slots(n: int) -> dict[str, bytes]:
    return {f"before:{n}": b"b"}


def running(world: int = 2, spares: int = 1, **limits: Any) -> ControllerDriver:
    return ControllerDriver(world=world, spares=spares, **limits).begin().open()


def lose_in_turn(desk: ControllerDriver, worker: str, n: int, **fault: Any) -> None:
    """`worker` dies, the others answer, and whoever was started for it is warm."""
    desk.lose(worker, n, slots=slots(n), **fault)
    for name in desk.seats():
        if name and desk.state.mode == "closing" and desk.state.members.workers[name].hello:
            desk.status(name, n, "idle")
    for name, other in tuple(desk.state.members.workers.items()):
        if other.hello is None:
            desk.hello(name)


def close_and_answer(desk: ControllerDriver, n: int, fault: events.Fault) -> None:
    for name in desk.seats():
        desk.status(name, n, "running", fault=fault if name == desk.seats()[0] else None)


def start_again(desk: ControllerDriver) -> None:
    """Every seat is lost, or has been; all start from the checkpoint as far as Ready."""
    for name in desk.seats():
        if name:
            desk.lose(name, 5)
    assert desk.state.mode == "gathering" and desk.state.progress.first


def finish(desk: ControllerDriver) -> Any:
    for name in tuple(desk.state.members.workers):
        desk.lose(name)
    return desk.end()


def test_four_ranks_that_die_in_each_others_recovery_are_four_accidents() -> None:
    desk = running(world=5, spares=4)
    for seat in range(4):
        lose_in_turn(desk, desk.seats()[seat], 5)
        assert desk.state.mode == "gathering", seat
    desk.heal(5)
    assert desk.state.mode == "open" and desk.state.progress.n == 5


def test_accidents_between_them_do_not_hide_that_a_fault_is_the_same() -> None:
    desk = running(world=2, spares=0)
    for attempt in range(3):
        assert desk.state.mode == "open", attempt
        close_and_answer(desk, 0, RAISED)
        if attempt < 2:
            desk.heal(0)
            lose_in_turn(desk, desk.seats()[1], 0)
            desk.heal(0)
    end = finish(desk)
    assert end.outcome == "user_error" and end.cause.traceback == RAISED.traceback


def test_a_fault_that_is_never_the_same_ends_the_run_too() -> None:
    desk = running(world=2, spares=0, attempts_max=2)
    attempt = 0
    while desk.state.mode == "open":
        attempt += 1
        other = events.Fault(kind="raised", detail="", traceback=f"ValueError: {attempt}")
        close_and_answer(desk, 0, other)
        desk.heal(0) if desk.state.mode == "gathering" else None
    assert attempt == 8 and desk.state.mode == "stopping"


def test_progress_gives_all_respawns_back() -> None:
    desk = running(spares=0, respawns_max=2)
    for n in range(1, 12):
        lose_in_turn(desk, desk.seats()[1], n)
        desk.heal(n)
        assert desk.state.mode == "open", n


def test_without_progress_respawns_end_and_the_checkpoint_is_the_last_resort() -> None:
    desk = running(spares=0, respawns_max=5)
    desk.say(desk.seats()[0], messages.Checkpointed(n=4, step=4, path="ck/4"))
    for count in range(5):
        lose_in_turn(desk, desk.seats()[1], 5)
        said = [note.text for note in desk.emitted(events.Note, history=True)]
        assert any("4 of 5 respawns" in text for text in said) == (count >= 3)
        desk.heal(5)
    lose_in_turn(desk, desk.seats()[1], 5)
    decided = desk.emitted(events.Decided, history=True)[-1]
    assert decided.rung == "restart" and "respawns_max" in decided.reason


def test_without_a_checkpoint_either_the_run_ends_and_says_why() -> None:
    desk = running(spares=0, respawns_max=1)
    lose_in_turn(desk, desk.seats()[1], 5)
    desk.heal(5)
    lose_in_turn(desk, desk.seats()[1], 5)
    assert desk.emitted(events.Decided, history=True)[-1].rung == "stop"
    end = finish(desk)
    assert end.outcome == "gave_up" and end.cause.kind == "killed"


def test_a_restart_is_not_refused_for_want_of_respawns() -> None:
    desk = running(world=4, spares=0, respawns_max=1)
    start_again(desk)
    assert len(desk.state.members.workers) == 4


def test_a_newer_checkpoint_is_progress_of_restarts() -> None:
    desk = running(spares=0, attempts_max=2)
    desk.say("", messages.Renew(beats={"w1-0": (99, 99, "running", 0.0)}))
    for n in range(1, 6):
        desk.say(desk.seats()[0], messages.Checkpointed(n=n, step=n, path=f"ck/{n}"))
        start_again(desk)
        for name in desk.seats():
            desk.hello(name)
        desk.heal(n)
        assert desk.state.mode == "open", n


def test_a_death_while_all_start_again_is_one_attempt_of_a_job_that_has_run() -> None:
    desk = running(spares=0, attempts_max=3)
    desk.say(desk.seats()[0], messages.Checkpointed(n=4, step=4, path="ck/4"))
    start_again(desk)
    desk.lose(desk.seats()[0], -1, "starting", kind="exited", exit_code=1)
    assert desk.end() is None and desk.state.mode == "clearing"
    desk.lose(desk.seats()[1], -1, "starting")
    assert desk.state.mode == "gathering" and desk.state.budgets.restarts == 2
    for name in desk.seats():
        desk.hello(name)
    desk.heal(4)
    assert desk.state.mode == "open"


def test_deaths_at_every_start_end_the_run_all_the_same() -> None:
    desk = running(spares=0, attempts_max=3)
    desk.say(desk.seats()[0], messages.Checkpointed(n=4, step=4, path="ck/4"))
    start_again(desk)
    for _ in range(9):
        for name in desk.seats():
            if name and desk.end() is None:
                desk.lose(name, -1, "starting", kind="exited", exit_code=1, traceback="E: x")
    end = desk.end()
    assert end is not None and end.outcome == "user_error"


def crash(desk: ControllerDriver, seat: int, n: int, **fault: Any) -> None:
    """A worker ends behind its phase n, and another one completes the next phase."""
    lose_in_turn(desk, desk.seats()[seat], n, **{**CRASH, **fault})
    if desk.state.mode == "gathering":
        desk.heal(n)


@pytest.mark.parametrize(
    "fault",
    [
        {"traceback": "Traceback\nValueError: sample 17"},
        {"exit_code": 42},
        {"kind": "killed", "exit_code": 0, "signal": 11},
        {"kind": "killed", "exit_code": 0, "signal": 9, "detail": f"1 process {HOST_MEMORY}"},
    ],
)
def test_a_failure_that_ends_each_worker_of_a_rank_ends_the_run(fault: dict[str, Any]) -> None:
    """Each of its workers completes a phase before."""
    desk = running(world=3, spares=0)
    for n in range(1, 6):
        crash(desk, 1, n, **fault)
        assert desk.state.mode == "open", n
    crash(desk, 1, 6, **fault)
    last = desk.emitted(events.Decided, history=True)[-1]
    assert last.rung == "stop" and "has ended 6 workers of rank 1" in last.reason
    assert last.rule.endswith("repeats_max")
    end = finish(desk)
    assert end.cause.seat == 1 and end.cause.kind == fault.get("kind", "exited")


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "killed", "exit_code": 0, "signal": 9},
        {"kind": "agent_lost", "exit_code": 0},
    ],
)
def test_accidents_of_a_rank_do_not(fault: dict[str, Any]) -> None:
    desk = running(world=3, spares=0)
    for n in range(1, 30):
        crash(desk, 1, n, **fault)
        assert desk.state.mode == "open", n


def test_a_failure_of_changing_ranks_ends_the_run_later() -> None:
    desk = running(world=8, spares=0)
    for n in range(1, 21):
        crash(desk, n % 8, n)
        assert desk.state.mode == "open", n
    crash(desk, 5, 21)
    last = desk.emitted(events.Decided, history=True)[-1]
    assert last.rung == "stop" and "ended 21 workers of any ranks" in last.reason


def test_failures_of_a_rank_that_differ_are_not_one() -> None:
    desk = running(world=3, spares=0)
    for n in range(1, 20):
        crash(desk, 1, n, exit_code=20 + n)
        assert desk.state.mode == "open", n


def test_a_takeover_counts_the_workers_of_the_hour() -> None:
    desk = running(world=3, spares=0)
    for n in range(1, 6):
        crash(desk, 1, n)
    later = ControllerDriver(world=3, spares=0, term=2)
    later.now_ns = desk.now_ns + S
    later.begin(journal=tuple(desk.journal()))
    assert later.state.budgets.failed == desk.state.budgets.failed != ()
