"""Takeovers: an open generation is adopted where nothing failed, and closed with its cause."""

from __future__ import annotations

from typing import Any

import pytest
from tests.controller.controller_driver import ControllerDriver, S

from outlast import events
from outlast.controller.inputs import (
    EndDecided,
    SaveRequested,
    StopRequested,
    Succession,
    TermBegan,
)
from outlast.controller.member_tables import NodePlacement
from outlast.transport import messages

RANKS = ("w1-0", "w1-1")


def trained(*, records: bool = True) -> ControllerDriver:
    """Return a controller of two ranks, whose set-up is over with `records`."""
    desk = ControllerDriver(world=2, spares=0).begin().open()
    for seat, worker in enumerate(RANKS if records else ()):
        desk.say(worker, messages.Recorded(seat=seat, record=b"set-up"))
    return desk


def successor(desk: ControllerDriver, *more: Any, term: int = 2) -> ControllerDriver:
    """Return the controller of a later term, which waits for its agents."""
    later = ControllerDriver(world=2, spares=0, term=term, lease_s=10)
    change = Succession("h2", "h1", later.now_ns - 3 * S // 2)
    later.begin(journal=(*desk.journal(), *more), succession=change)
    return later


def report(later: ControllerDriver, *alive: str, n: int = 0) -> None:
    """Send what an agent repeats to a later term: its workers, their Hellos, and a renewal."""
    hello = messages.AgentHello(host="h", address="", capacity=9, lease_s=10, workers=alive)
    later.say("", hello)
    for worker in alive:
        later.hello(worker)
    later.say("", messages.Renew(beats=dict.fromkeys(alive, (n, n, "running", 0.0))))


def causes(later: ControllerDriver) -> list[tuple[str, str]]:
    noticed = later.emitted(events.Noticed, history=True)
    return [(one.fault.kind, one.fault.worker) for one in noticed]


def test_an_open_generation_without_a_failure_goes_on() -> None:
    later = successor(trained())
    report(later, *RANKS, n=7)
    assert later.state.mode == "open" and later.state.generation == 1
    assert not later.sent(messages.Close, history=True) and not causes(later)
    assert {worker for worker, _ in later.sent(messages.Open)} == set(RANKS)
    (note,) = later.emitted(events.Note)
    assert (
        "h2 is the controller, term 2, after 1.5 s without an answer of the one on h1" in note.text
    )
    later.lose("w1-1", 8)
    assert later.state.mode == "closing" and causes(later) == [("killed", "w1-1")]


@pytest.mark.parametrize(
    ("request_of", "kind", "asked"),
    [(SaveRequested, "save", "save"), (StopRequested, "requested", "drain")],
)
def test_a_request_that_comes_before_the_adoption_is_carried_out(
    request_of: type[SaveRequested | StopRequested], kind: str, asked: str
) -> None:
    later = successor(trained())
    later.feed(request_of(t_ns=later.now_ns, reason="SIGUSR1"))
    report(later, *RANKS, n=7)
    assert later.state.mode == "closing" and causes(later) == [(kind, "")]
    for worker in RANKS:
        later.status(worker, 7, "idle")
    later.heal(7)
    assert [body.ask for _, body in later.sent(messages.Open, history=True)][-2:] == [asked] * 2


def test_a_committed_phase_proves_that_set_up_is_over() -> None:
    later = successor(trained(records=False))
    report(later, *RANKS, n=1)
    assert later.state.mode == "open"


def test_a_takeover_in_set_up_closes_the_generation_by_name() -> None:
    later = successor(trained(records=False))
    report(later, *RANKS)
    assert later.state.mode == "closing" and causes(later) == [("controller_lost", "")]


def test_nothing_is_decided_before_an_agent_has_repeated_all() -> None:
    later = successor(trained())
    hello = messages.AgentHello(host="h", address="", capacity=9, lease_s=10, workers=RANKS)
    later.say("", hello)
    assert later.state.mode == "awaiting"
    later.tick(6)
    assert later.state.mode == "awaiting"
    later.report()
    assert later.state.mode == "closing"  # their Hellos were lost


def test_the_cause_of_a_failure_in_the_gap_is_known() -> None:
    later = successor(trained())
    hello = messages.AgentHello(host="h", address="", capacity=9, lease_s=10, workers=("w1-0",))
    later.say("", hello)
    later.lose("w1-1", 5)
    later.lose("w1-1", 5)  # repeated on a second connection
    later.hello("w1-0")
    later.report()
    assert later.state.mode == "closing" and causes(later) == [("killed", "w1-1")]


def test_a_rank_that_has_left_the_generation_ends_it() -> None:
    later = successor(trained())
    hello = messages.AgentHello(host="h", address="", capacity=9, lease_s=10, workers=RANKS)
    later.say("", hello)
    for worker in RANKS:
        later.hello(worker)
    broken = events.Fault(kind="transport", detail="connection reset")
    later.status("w1-1", 5, "running", fault=broken)
    later.report()
    assert later.state.mode == "closing" and causes(later) == [("transport", "w1-1")]


def test_a_lost_node_counts_from_the_last_answer_of_its_controller() -> None:
    later = successor(trained())
    later.tick(11)  # nobody reports: all ranks start again
    assert later.state.mode == "gathering"
    later = successor(trained())
    report(later, "w1-0")
    (noticed,) = later.emitted(events.Noticed, history=True)
    assert (noticed.fault.kind, noticed.fault.seat, noticed.how) == ("agent_lost", 1, "lease")
    assert later.now_ns - noticed.fault.t_ns == pytest.approx(1.5 * S, abs=S / 100)


def test_the_own_state_of_a_rank_lost_with_the_controller_comes_from_its_partners() -> None:
    later = successor(trained())
    later.state.placement = NodePlacement(agents=("a",), ranks_per_node=2)
    report(later, "w1-0", n=5)
    later.status("w1-0", 5, "running")
    (ask,) = [body for _, body in later.sent(messages.PartnerSlotsRequest)]
    assert (ask.seats, ask.n) == ((1,), 5)
    slots = {"before:5": (1, b"b5")}
    later.say("", messages.PartnerSlots(n=5, since=ask.since, slots={1: slots}))
    assert later.decision().verdict == "redo" and later.emitted(events.Decided)[0].step == 5


def test_a_decision_that_was_not_opened_is_not_adopted() -> None:
    desk = trained()
    desk.status("w1-1", 5, "running", fault=events.Fault(kind="transport", detail="reset"))
    desk.status("w1-0", 5, "running")
    assert desk.state.mode == "gathering"
    later = successor(desk)
    report(later, *RANKS, n=5)
    assert later.state.mode == "closing"


def overtaken() -> ControllerDriver:
    """Return a controller that has decided for a spare which still starts, before which another
    one was there."""
    desk = ControllerDriver(world=2, spares=2).begin()
    desk.agent()
    for worker in RANKS:
        desk.hello(worker)
    desk.heal(0)
    for seat, worker in enumerate(RANKS):
        desk.say(worker, messages.Recorded(seat=seat, record=b"set-up"))
    desk.lose("w1-1", 5, slots={"before:5": b"b5"})
    desk.status("w1-0", 5, "running")
    desk.hello("w1-3")
    assert desk.decision().seats == ("w1-0", "w1-2") and desk.seats() == ("w1-0", "w1-3")
    return desk


def test_a_generation_is_adopted_with_the_workers_that_took_seats_after_its_decision() -> None:
    desk = overtaken()
    desk.heal(5)
    assert desk.state.mode == "open"
    later = successor(desk)
    report(later, "w1-0", "w1-3", n=7)
    assert later.state.mode == "open" and later.seats() == ("w1-0", "w1-3")
    assert not later.killed()


def test_nodes_that_may_have_filled_a_seat_are_waited_for() -> None:
    """A decision does not name who took its seats before the generation opened."""
    later = ControllerDriver(world=2, spares=2, term=2, lease_s=10)
    later.state.placement = NodePlacement(agents=("a", "b"), ranks_per_node=1)
    later.begin(journal=overtaken().journal(), succession=Succession("h2", "h1", later.now_ns))
    report(later, "w1-0", n=5)
    assert later.state.mode == "awaiting" and later.state.term.fence_wait == ("a", "b")
    later.tick(6)
    later.report()
    later.tick(5)
    assert later.state.mode == "closing"


def test_a_drain_goes_on_under_the_next_controller() -> None:
    desk = trained()
    desk.stop()
    later = successor(desk)
    report(later, *RANKS, n=5)
    assert later.state.mode == "closing"
    for worker in RANKS:
        later.status(worker, 5, "running")
    later.heal(5)
    assert {body.ask for _, body in later.sent(messages.Open)} == {"drain"}


def test_a_drain_of_an_earlier_start_is_over() -> None:
    desk = trained()
    desk.stop()
    later = successor(desk, TermBegan(read={1: 9}), term=3)
    assert not later.state.ending.drain_ns


def test_an_end_that_was_decided_ends_the_run() -> None:
    later = successor(trained(), EndDecided(outcome="done", n=9, step=8))
    report(later, "w1-0", n=9)
    assert [body.ok for _, body in later.sent(messages.Stop)] == [True]
    later.lose("w1-0", 9, "finished", kind="exited")
    end = later.end()
    assert end is not None and (end.outcome, end.n, end.step) == ("done", 9, 9)


def test_only_a_run_of_several_nodes_records_its_end() -> None:
    desk = trained()
    for worker in RANKS:
        desk.say(worker, messages.Finished(n=3, step=3))
    assert not any(isinstance(entry, EndDecided) for entry in desk.journal())


def test_a_start_without_any_survivor_is_an_incident_with_its_steps() -> None:
    later = successor(trained())
    later.say("", messages.AgentHello(host="h", address="", capacity=9, lease_s=10))
    for worker in RANKS:
        fault = events.Fault(kind="agent_lost", detail="the lease ended")
        lost = messages.WorkerLostReport(worker=worker, fault=fault, n=7, state="running")
        later.say("", lost)
    later.tick(6)
    later.report()
    later.tick(6)
    assert later.state.mode == "gathering"
    assert causes(later) == [("agent_lost", worker) for worker in RANKS]
    (decided,) = later.emitted(events.Decided, history=True)
    assert (decided.rung, decided.n) == ("restart", 0)
