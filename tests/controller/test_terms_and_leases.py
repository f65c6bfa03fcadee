"""Dropped frames, expired leases, and takeover by a later term."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.controller.controller_driver import ControllerDriver, S

from outlast import events
from outlast.controller.inputs import (
    AgentLost,
    DecisionMade,
    Opened,
    Received,
    SharedValueStored,
)
from outlast.controller.member_tables import NodePlacement
from outlast.controller.state_machine import handle
from outlast.transport import messages

SLOTS = {"before:5": b"b5", "after:5": b"a5", "result:5": b"r5", "before:4": b"b4"}
TRANSPORT = events.Fault(kind="transport", detail="connection reset")
RAISED = events.Fault(kind="raised", detail="ValueError", traceback="Traceback: ValueError")


def running(world: int = 2, spares: int = 1, **limits: Any) -> ControllerDriver:
    return ControllerDriver(world=world, spares=spares, **limits).begin().open()


def recover(desk: ControllerDriver, n: int) -> None:
    desk.heal(n)
    assert desk.state.mode == "open"


# --- what is dropped ------------------------------------------------------------------------


def notes(desk: ControllerDriver) -> str:
    return " ".join(note.text for note in desk.emitted(events.Note))


@pytest.mark.parametrize(
    ("envelope", "says"),
    [
        ({"term": 0}, "term 0"),
        ({"incarnation": 0}, "incarnation 0"),
        ({"incarnation": 2}, "has not sent Hello"),
        ({"seq": 1}, "is not newer"),
        ({"agent": "b"}, "has not sent Hello"),
    ],
)
def test_frames_of_the_past_are_dropped_and_said(envelope: dict[str, int], says: str) -> None:
    desk = running()
    desk.say("w1-0", messages.Finished(n=1), **envelope)
    assert not desk.state.members.workers["w1-0"].finished
    assert says in notes(desk)


@pytest.mark.parametrize(
    "body",
    [
        messages.WorkerReady(generation=1, n=0),
        messages.Joined(generation=1),
        messages.Put(generation=1, key="k", value=b""),
        messages.Status(generation=1, n=0, step=0, state="idle"),
    ],
)
def test_frames_of_a_closed_generation_are_dropped(body: Any) -> None:
    desk = running()
    desk.status("w1-1", 0, "running", fault=TRANSPORT)
    desk.status("w1-0", 0, "running")
    before = desk.state.members.workers["w1-0"]
    assert desk.state.generation == 2
    desk.say("w1-0", body)
    assert desk.state.members.workers["w1-0"] == before and not desk.sent(messages.RendezvousValue)
    assert "of generation 1, now 2" in notes(desk)


def test_the_words_of_a_given_up_worker_count_no_more() -> None:
    desk = running()
    desk.say("", messages.Suspect(worker="w1-1", fault=events.Fault(kind="hung", detail="stuck")))
    desk.status("w1-1", 6, "idle")
    assert desk.state.members.workers["w1-1"].status is None
    desk.say("w1-9", messages.WorkerHello(pid=1, fingerprint={}, address=""))
    assert "no longer belongs to this run" in notes(desk)


def test_notes_about_dropped_frames_thin_out() -> None:
    desk = running()
    for _ in range(1000):
        desk.say("w1-0", messages.Finished(n=1), seq=1)
    assert len(desk.emitted(events.Note, history=True)) < 30


# --- leases and terms -------------------------------------------------------------------------


def test_workers_of_a_silent_agent_are_lost_when_its_lease_is_out() -> None:
    desk = running(lease_s=10)
    desk.feed(AgentLost(t_ns=desk.now_ns, agent="a", incarnation=1))
    desk.tick(9)
    assert desk.state.mode == "open"
    desk.tick(2)
    lost = desk.emitted(events.WorkerLost)
    assert {event.worker for event in lost} == {"w1-0", "w1-1", "w1-2"}
    assert {event.fault.kind for event in lost} == {"agent_lost"}
    desk.say("", messages.Renew())
    assert "lease has expired" in notes(desk)


def test_an_agent_that_comes_back_hears_again_what_was_asked() -> None:
    desk = running()
    desk.status("w1-1", 0, "running", fault=TRANSPORT)
    desk.feed(AgentLost(t_ns=desk.now_ns, agent="a", incarnation=1))
    desk.agent("w1-0", "w1-1", "w1-2")
    assert {w for w, _ in desk.sent(messages.Close)} == {"w1-0", "w1-1"}


def test_workers_that_nobody_knows_are_killed() -> None:
    desk = running()
    desk.agent("w1-0", "w1-1", "w1-2", "w0-7")
    assert "w0-7" in desk.killed()


def later_term(desk: ControllerDriver, *alive: str, **begin: Any) -> ControllerDriver:
    later = ControllerDriver(world=desk.world, spares=1, term=2, lease_s=10)
    later.begin(journal=desk.journal(), **begin)
    later.agent(*alive)
    return later


def test_a_later_term_closes_the_old_generation_and_goes_on() -> None:
    desk = running()
    later = later_term(desk, "w1-0", "w1-1")
    assert {w for w, _ in later.sent(messages.Close)} == {"w1-0", "w1-1"}
    for worker in ("w1-0", "w1-1"):
        later.hello(worker)
        later.status(worker, 5, "running")
    assert later.decision().generation == 2 and later.state.progress.n == 5
    assert later.emitted(events.Decided)[0].rung == "retry"


def test_a_later_term_knows_what_a_lost_worker_left_and_what_was_shared() -> None:
    desk = running()
    desk.say("w1-0", messages.SharedValueRequest(name="id"))
    desk.say("w1-0", messages.SharedValueMade(name="id", value=b"7"))
    desk.say("w1-1", messages.Recorded(seat=1, record=b"set-up"))
    desk.lose("w1-1", 5, slots=SLOTS)
    desk.status("w1-0", 5, "running")
    later = later_term(desk, "w1-0")
    later.hello("w1-0")
    later.status("w1-0", 5, "idle")
    (spare, _) = later.sent(messages.Spawn, history=True)[0][1].worker, None
    later.hello(spare)
    (seat,) = [body for _, body in later.sent(messages.Seat)]
    assert seat.slots["before:5"] == b"b5" and seat.record == b"set-up"
    later.say("w1-0", messages.SharedValueRequest(name="id"))
    assert later.sent(messages.SharedValueReply)[0][1].value == b"7"


def test_a_later_term_never_goes_behind_a_decision() -> None:
    desk = running(spares=1)
    desk.status("w1-0", 5, "idle", fault=TRANSPORT)
    desk.status("w1-1", 4, "prepared")
    assert desk.decision().verdict == "commit"
    later = later_term(desk, "w1-1")  # w1-0 died while no controller was there
    later.lose("w1-0", 5, slots=SLOTS)
    later.hello("w1-1")
    later.status("w1-1", 4, "prepared")
    decided = later.decision()
    assert (decided.generation, decided.n, decided.verdict) == (3, 5, "commit")
    assert decided.slots[0] == {key: SLOTS[key] for key in ("before:5", "after:5", "result:5")}


def test_a_joiner_of_an_earlier_term_is_no_donor_of_a_later_one() -> None:
    desk = running()
    desk.lose("w1-1", 5, slots=SLOTS)
    desk.status("w1-0", 5, "running")
    later = later_term(desk, "w1-0", "w1-2")
    for worker in ("w1-0", "w1-2"):
        later.hello(worker)
        later.status(worker, 5, "idle")
    later.heal(5)
    assert later.state.progress.transfers == ((0, 1),)


def test_without_survivors_a_later_term_starts_at_once_from_the_checkpoint() -> None:
    desk = running()
    point = messages.Checkpointed(n=4, step=4, path="ck/4")
    later = later_term(desk, checkpoint=point)
    for worker in tuple(later.state.members.workers):
        later.hello(worker)
    first = later.sent(messages.Seat, history=True)[0][1]
    assert (first.generation, first.n, first.first, first.checkpoint) == (2, 4, True, point)
    assert set(later.state.members.workers) == {"w2-0", "w2-1", "w2-2"}


def test_a_later_term_waits_for_an_agent_that_may_still_live() -> None:
    desk = running()
    later = ControllerDriver(world=2, spares=1, term=2, lease_s=10).begin(journal=desk.journal())
    later.agent(agent="b")
    later.tick(5)
    assert later.state.mode == "awaiting"
    later.say("", messages.Renew(), agent="b")
    later.tick(6)
    assert later.state.mode == "gathering"


def unsent(desk: ControllerDriver, *seats: str, agent: str) -> DecisionMade:
    """Return a decision that the old owner has appended and, deposed meanwhile, not sent."""
    old = desk.decision()
    return DecisionMade(
        generation=old.generation + 1, n=0, step=0, verdict="redo", seats=seats,
        agents=(agent,) * len(seats),
    )  # fmt: skip


def test_a_decision_that_was_never_sent_lets_nobody_forget_the_agents_of_the_open_generation() -> (
    None
):
    desk = running()
    later = ControllerDriver(world=2, spares=1, term=2, lease_s=10)
    later.begin(journal=(*desk.journal(), unsent(desk, "w1-8", "w1-9", agent="b")))
    later.agent("w1-8", "w1-9", agent="b")
    later.hello("w1-8")
    assert later.state.mode == "awaiting"  # workers of agent a may commit in generation 1
    later.agent("w1-0", "w1-1")
    assert {"w1-0", "w1-1"} <= later.killed() and later.state.mode == "awaiting"
    later.lose("w1-0")
    assert later.state.mode == "awaiting"
    later.lose("w1-1")
    assert later.state.mode == "closing"


def test_a_later_term_waits_for_strays_beyond_the_lease() -> None:
    desk = running()
    later = later_term(desk, "w1-0", "w0-7")
    later.agent("w1-0", "w0-7")
    assert "w0-7" in later.killed()
    later.tick(6)
    later.say("", messages.Renew())
    later.tick(5)
    assert later.state.mode == "awaiting"
    later.lose("w0-7")
    assert later.state.mode == "closing"


def test_a_spare_of_an_earlier_term_takes_the_seat_of_a_rank_lost_with_its_controller() -> None:
    desk = running()
    later = ControllerDriver(world=2, spares=1, term=2, lease_s=10).begin(journal=desk.journal())
    hello = messages.AgentHello(
        host="h", address="", capacity=9, lease_s=10, workers=("w1-0", "w1-2"), unseated=("w1-2",)
    )
    later.say("", hello)
    later.lose("w1-1", 5, slots=SLOTS)
    later.report()
    for worker in ("w1-0", "w1-2"):
        later.hello(worker)
    later.status("w1-0", 5, "running")
    assert later.seats() == ("w1-0", "w1-2") and not later.killed()


def test_a_later_term_compares_newcomers_with_the_survivors() -> None:
    desk = running()
    later = ControllerDriver(world=2, spares=2, term=2, lease_s=10).begin(journal=desk.journal())
    alive = ("w1-0", "w1-2")
    later.say(
        "", messages.AgentHello(
            host="h", address="", capacity=9, lease_s=10, workers=alive, unseated=("w1-2",)
        ),
    )  # fmt: skip
    later.hello("w1-2", torch="2.12")  # greets before the survivor
    later.hello("w1-0", torch="2.13")
    later.report()
    assert later.killed() == {"w1-2"}


def test_a_start_after_a_takeover_does_not_wait_for_a_node_that_is_gone() -> None:
    placement = NodePlacement(agents=("a", "b", "c"), ranks_per_node=1)
    desk = running()
    later = ControllerDriver(world=2, spares=1, term=2, lease_s=10)
    later.state.placement = placement
    later.begin(journal=desk.journal())
    for agent in ("b", "c"):
        later.agent(agent=agent, capacity=1)
    later.tick(6)
    for agent in ("b", "c"):
        later.say("", messages.Renew(), agent=agent)
    later.tick(5)
    assert len(later.sent(messages.Spawn, history=True)) == 2


def test_a_spawn_that_crosses_a_hello_is_no_lost_worker() -> None:
    desk = running(lease_s=10)
    desk.agent("w1-0", "w1-1")  # sent before the spare was there
    desk.say("", messages.Spawned(worker="w1-2", pid=7))
    desk.tick(5)
    desk.say("", messages.Renew())
    desk.tick(6)
    assert not desk.emitted(events.WorkerLost, history=True)


def test_an_agent_that_came_back_without_a_worker_kills_it_if_its_spawn_arrives_late() -> None:
    desk = running()
    desk.agent(incarnation=2, seq=1)
    assert "w1-2" in desk.killed()


# --- the shape of handle --------------------------------------------------------------------


def test_handle_is_pure() -> None:
    desk = running()
    before = msgspec.msgpack.encode(desk.state)
    event = Received(
        t_ns=desk.now_ns,
        envelope=messages.MessageEnvelope(
            run="r", term=1, agent="a", incarnation=1, worker="", seq=99,
            body=messages.WorkerLostReport(worker="w1-1", fault=TRANSPORT, n=1, state="running"),
        ),
    )  # fmt: skip
    first = handle(desk.state, event)
    assert msgspec.msgpack.encode(desk.state) == before
    second = handle(desk.state, event)
    assert first[1] == second[1]
    assert msgspec.msgpack.encode(first[0]) == msgspec.msgpack.encode(second[0])


def test_the_journal_can_be_written_and_read() -> None:
    desk = running()
    desk.say("w1-0", messages.SharedValueRequest(name="id"))
    desk.say("w1-0", messages.SharedValueMade(name="id", value=b"7"))
    entries = desk.journal()
    assert any(isinstance(entry, Opened) for entry in entries)
    assert any(isinstance(entry, SharedValueStored) for entry in entries)
    assert desk.state.clock.wake_ns > desk.now_ns - S


def test_a_worker_that_its_agent_no_longer_has_is_lost_after_a_grace() -> None:
    desk = running(lease_s=10)
    desk.agent("w1-0", "w1-2")  # the connection broke; w1-1 died meanwhile, and Lost may follow
    assert desk.state.mode == "open"
    desk.tick(9)
    desk.say("", messages.Renew())
    assert desk.state.mode == "open"
    desk.tick(2)
    assert [event.worker for event in desk.emitted(events.WorkerLost)] == ["w1-1"]
    assert desk.state.mode == "closing"
