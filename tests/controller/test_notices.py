"""Notices: moves between two steps, and saves and ends before a deadline where none is possible."""

from __future__ import annotations

from typing import Any

import pytest
from tests.controller.controller_driver import ControllerDriver, S
from tests.controller.test_scheduler_drains import NodesDriver

from outlast import events
from outlast.controller.inputs import SchedulerChecked
from outlast.controller.lifecycle.notice_deadlines import MOVE_S, REGROUP_S, SAVE_FACTOR, UNTIMED_S
from outlast.transport import messages


def notice(host: str = "h", within_s: float = 0.0, **words: Any) -> events.Warned:
    fields = {"check": "operator", "code": "1", "device": "", "worker": "", **words}
    return events.Warned(
        t_ns=1, host=host, symptom="node-drain", severity="drain", detail="by hand",
        within_s=within_s, **fields,
    )  # fmt: skip


def give(run: ControllerDriver, *notices: events.Warned, check: str = "operator") -> None:
    """Give these notices, in place of all earlier ones of this source."""
    run.now_ns += 1000
    run.feed(SchedulerChecked(t_ns=run.now_ns, check=check, found=notices))


def desk(spares: int = 1, **limits: Any) -> ControllerDriver:
    """A run on one host, in its second phase; each renewal shows that its ranks make steps."""
    made = ControllerDriver(world=3, spares=spares, lease_s=1e6, hello_s=1e6, **limits)
    made.begin().open()
    step(made)
    return made


def step(run: ControllerDriver) -> None:
    n = run.state.progress.n + 1
    run.say("", messages.Renew(beats=dict.fromkeys(run.seats(), (n, n, "running", 0.0))))


def saved(run: ControllerDriver, n: int, seconds: float) -> None:
    body = messages.Checkpointed(n=n, step=n, path=f"step {n}", flush_s=seconds)
    run.say(run.seats()[0], body)


def asks(run: ControllerDriver) -> list[str]:
    """What the generations that opened asked of rank 0 first."""
    first = run.state.members.seats[0]
    return [body.ask for name, body in run.sent(messages.Open, history=True) if name == first]


def regroup(run: ControllerDriver, n: int) -> None:
    """All ranks answer the Close of a request, and make a phase in the next generation."""
    generation = run.state.generation
    for worker in run.seats():
        if run.state.generation == generation:
            run.status(worker, n, "idle")
    run.heal(n)
    step(run)


def notes(run: ControllerDriver, text: str) -> list[str]:
    return [one.text for one in run.emitted(events.Note, history=True) if text in one.text]


def gone(run: ControllerDriver) -> set[str]:
    return run.killed() & set(run.state.members.workers)


def test_a_rank_is_given_up_only_when_it_stands_between_two_steps() -> None:
    run = desk()
    old = run.seats()[1]
    give(run, notice(worker=old))
    step(run)
    assert run.sent(messages.Leave, history=True) == [(old, messages.Leave(generation=1))]
    for _ in range(3):
        give(run, notice(worker=old))
        step(run)
    assert len(run.sent(messages.Leave, history=True)) == 1 and run.state.mode == "open"
    run.status(old, 2, "idle")
    assert gone(run) == {old} and run.state.mode == "closing"
    (reported,) = run.emitted(events.Reported, history=True)
    assert (reported.worker, reported.n, reported.state) == (old, 2, "idle")
    (noticed,) = run.emitted(events.Noticed, history=True)
    assert (noticed.how, noticed.fault.kind, noticed.fault.seat) == ("notice", "requested", 1)
    run.lose(old, 2, "idle", slots={"before:2": b"own"}, kind="requested", detail="killed")
    for worker in (run.seats()[0], run.seats()[2]):
        run.status(worker, 2, "running")
    (decided,) = run.emitted(events.Decided, history=True)
    assert (decided.rung, decided.n, decided.replaced) == ("migrate", 2, ((1, old, "w1-3"),))


@pytest.mark.parametrize(("within_s", "limit_s"), [(20.0, 10.0), (0.0, 60.0), (1e4, 60.0)])
def test_a_rank_that_comes_to_no_boundary_is_given_up_in_time(
    within_s: float, limit_s: float
) -> None:
    run = desk(hang_ceiling_s=60.0)
    old = run.seats()[1]
    give(run, notice(worker=old, within_s=within_s))
    step(run)
    run.tick(limit_s - 0.1)
    assert not gone(run) and run.state.mode == "open"
    assert run.state.clock.wake_ns <= run.now_ns + int(0.2 * S)
    run.tick(0.2)
    assert gone(run) == {old}


def test_a_notice_that_is_taken_back_meanwhile_costs_a_retry() -> None:
    run = desk()
    old = run.seats()[1]
    give(run, notice(worker=old))
    step(run)
    give(run)
    run.status(old, 1, "idle")
    assert run.state.mode == "closing" and not run.killed()
    for worker in (run.seats()[0], run.seats()[2]):
        run.status(worker, 1, "running")
    (decided,) = run.emitted(events.Decided, history=True)
    assert decided.rung == "retry" and "not wanted any more" in decided.reason


def test_a_request_to_leave_ends_with_its_generation() -> None:
    run = desk(spares=2)
    first, old, _ = run.seats()
    give(run, notice(worker=old))
    step(run)
    run.lose(first, slots={"before:1": b"own"}, signal=9)
    for worker in run.seats()[1:]:
        run.status(worker, 1, "running")
    run.heal(1)
    assert run.state.generation == 2 and not gone(run)
    step(run)
    leaves = [body.generation for _, body in run.sent(messages.Leave, history=True)]
    assert leaves == [1, 2]


def test_without_a_spare_the_run_saves_at_once_and_ends_before_the_deadline() -> None:
    run = desk(spares=0)
    give(run, notice(within_s=100.0))
    step(run)
    assert run.state.mode == "closing" and run.sent(messages.Close, history=True)
    regroup(run, 1)
    assert asks(run) == ["", "save"]
    saved(run, 1, 4.0)
    needs_s = SAVE_FACTOR * 4.0 + REGROUP_S
    assert notes(run, "no save was timed yet") and "the run saves now" in notes(run, "timed")[0]
    run.tick(100 - needs_s - 0.1)
    assert run.state.mode == "open" and not run.state.ending.drain_ns
    run.tick(0.2)
    assert run.state.mode == "closing" and "by hand" in run.state.ending.drain_reason
    left_s = (run.state.ending.drain_ns - run.now_ns) / S
    assert needs_s - 1 < left_s <= needs_s, "the drain may take until the deadline"
    regroup(run, 2)
    assert asks(run) == ["", "save", "drain"]
    for worker in run.seats():
        run.say(worker, messages.Finished(n=2))
    for worker in tuple(run.state.members.workers):
        run.lose(worker, 2, kind="requested", detail="ended")
    end = run.end()
    assert end is not None and (end.outcome, end.exit_code) == ("interrupted", 4)


def test_a_save_that_cannot_fit_is_not_made_and_that_is_said_at_once() -> None:
    run = desk(spares=0)
    saved(run, 1, 30.0)
    give(run, notice(within_s=40.0))
    step(run)
    (text,) = notes(run, "no save is known to fit")
    assert "a save takes 30.0 s, and 40.0 s remain" in text and "that of step 1" in text
    for _ in range(50):
        run.tick(1)
        give(run, notice(within_s=max(0.1, 39.0 - run.now_ns / S)))
    assert run.state.generation == 1 and run.state.mode == "open" and run.end() is None
    assert len(notes(run, "no save is known to fit")) == 1


def test_a_notice_that_comes_too_late_is_said_and_ends_nothing() -> None:
    run = desk(spares=0)
    saved(run, 1, 1.0)
    give(run, notice(within_s=0.5))
    step(run)
    assert notes(run, "no save is known to fit") and run.state.mode == "open"
    run.tick(2 * MOVE_S)
    assert run.state.mode == "open" and run.end() is None


def test_a_spare_that_comes_meanwhile_takes_the_rank_and_the_run_goes_on() -> None:
    run = desk()
    old = run.seats()[1]
    saved(run, 1, 1.0)
    run.lose("w1-3")  # another spare is started
    give(run, notice(worker=old, within_s=100.0))
    step(run)
    regroup(run, 1)
    assert asks(run) == ["", "save"] and notes(run, "the run saves now")
    (spare,) = run.state.members.unseated
    run.hello(spare)
    step(run)
    run.status(old, 2, "idle")
    assert gone(run) == {old}
    run.lose(old, 2, "idle", slots={"before:2": b"own"}, kind="requested", detail="killed")
    for worker in (run.seats()[0], run.seats()[2]):
        run.status(worker, 2, "idle")
    run.heal(2)
    run.tick(100)
    assert run.seats()[1] == spare and run.end() is None and not run.state.ending.drain_ns


def test_without_a_spare_a_notice_that_is_taken_back_ends_nothing() -> None:
    run = desk(spares=0)
    give(run, notice(within_s=100.0))
    step(run)
    regroup(run, 1)
    assert run.state.notices.answers
    give(run)
    assert not run.state.notices.answers
    run.tick(200)
    assert run.state.mode == "open" and run.end() is None


def test_of_two_notices_the_earlier_deadline_counts() -> None:
    run = desk(spares=0)
    saved(run, 1, 1.0)
    give(run, notice(within_s=1000.0), notice(within_s=50.0, code="2"))
    give(run, notice(within_s=500.0, check="aws"), check="aws")
    step(run)
    regroup(run, 1)
    run.tick(50 - SAVE_FACTOR - REGROUP_S + 0.1)
    assert run.state.ending.drain_ns


@pytest.mark.parametrize("spares", [0, 1])
def test_in_set_up_a_near_deadline_ends_the_run_only_without_a_spare(spares: int) -> None:
    run = ControllerDriver(world=3, spares=spares, lease_s=1e6, hello_s=1e6)
    run.begin().open()
    give(run, notice(worker=run.seats()[1], within_s=20.0))
    run.tick(8)
    assert bool(run.state.ending.drain_ns) == (spares == 0) and run.end() is None
    run.tick(20)
    assert bool(run.state.ending.result) == (spares == 0)


def test_a_repeated_notice_repeats_nothing() -> None:
    run = desk(spares=0)
    saved(run, 1, 1.0)
    give(run, notice(within_s=100.0))
    step(run)
    regroup(run, 1)
    for number in range(40):
        run.now_ns += S
        give(run, notice(within_s=100.0 - number))
        step(run)
    assert asks(run) == ["", "save"] and len(notes(run, "cannot move")) == 1


def test_an_untimed_save_is_allowed_for() -> None:
    run = desk(spares=0)
    give(run, notice(within_s=100.0))
    step(run)
    regroup(run, 1)
    run.tick(100 - SAVE_FACTOR * UNTIMED_S - REGROUP_S + 0.1)
    assert run.state.ending.drain_ns


def test_without_a_deadline_ranks_stay_until_there_is_a_spare() -> None:
    run = desk(spares=0)
    give(run, notice(worker=run.seats()[1]))
    step(run)
    run.tick(1000)
    assert run.state.generation == 1 and notes(run, "not moved yet") and run.end() is None


def test_a_notice_to_all_hosts_ends_the_run_behind_a_save() -> None:
    run = NodesDriver().start()
    give(run, *(notice(host, within_s=60.0) for host in run.nodes))
    run.step()
    assert run.state.mode == "closing" and not run.leaving()
    regroup(run, 1)
    run.step()
    saved(run, 1, 1.0)
    run.tick(60 - SAVE_FACTOR - REGROUP_S + 0.1)
    assert "by hand" in run.state.ending.drain_reason


def test_ranks_that_other_hosts_have_room_for_do_not_end_the_run() -> None:
    """The spare was used; the node that it left has room, and other ranks hold the state."""
    run = NodesDriver(("n1", "n2", "n3"), world=2, spares=1).start()
    for worker in tuple(run.state.members.unseated):
        run.lose(worker)
    give(run, notice("n2", within_s=60.0))
    run.step()
    run.tick(60)
    assert run.end() is None and not run.state.ending.drain_ns


@pytest.mark.parametrize("check", ["operator", "aws", "slurm"])
def test_only_moves_for_the_scheduler_are_limited(check: str) -> None:
    nodes = tuple(f"n{number}" for number in range(1, 11))
    run = NodesDriver(nodes, world=5, spares=5).start()
    for host in nodes[:5]:
        give(run, notice(host, check=check, code=host), check=check)
        run.step()
        run.come_to_boundary()
        if run.leaving():
            run.move()
    moved = sum(place not in nodes[:5] for place in run.places())
    assert moved == (3 if check == "slurm" else 5)
