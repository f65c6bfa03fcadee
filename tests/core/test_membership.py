"""The controller, turn by turn: what it says, what it drops, how it ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from outlast import errors, events, wire
from outlast.core.membership import AgentGone, Opened, Received, SharedKept, handle
from outlast.testing.desk import Desk, S

SLOTS = {"before:5": b"b5", "after:5": b"a5", "result:5": b"r5", "before:4": b"b4"}
TRANSPORT = events.Fault(kind="transport", detail="connection reset")
RAISED = events.Fault(kind="raised", detail="ValueError", traceback="Traceback: ValueError")


def running(world: int = 2, spares: int = 1, **limits: Any) -> Desk:
    return Desk(world=world, spares=spares, **limits).begin().open()


def recover(desk: Desk, n: int) -> None:
    desk.heal(n)
    assert desk.state.mode == "open"


# --- the undisturbed run -----------------------------------------------------------------


def test_a_run_from_first_to_last_frame() -> None:
    desk = Desk(world=2, spares=1).begin()
    desk.agent()
    assert [body.seat for _, body in desk.sent(wire.Spawn)] == [0, 1, -1]
    desk.hello("w1-0")
    assert not desk.sent(wire.Seat)
    desk.hello("w1-1")
    assert all(body.first and body.n == 0 for _, body in desk.sent(wire.Seat))
    assert len(desk.sent(wire.Seat)) == 2
    desk.heal(0)
    assert desk.sent(wire.Open)[0][1] == wire.Open(generation=1, n=0)
    desk.hello("w1-2")
    for worker in desk.seats():
        desk.say(worker, wire.Finished(n=9))
    assert {worker for worker, body in desk.sent(wire.Stop) if body.ok} == {"w1-0", "w1-1", "w1-2"}
    for worker in ("w1-0", "w1-1", "w1-2"):
        desk.lose(worker, 9, "finished", kind="exited", detail="exit 0")
    end = desk.end()
    assert end is not None and (end.outcome, end.exit_code, end.n) == ("done", errors.EXIT_DONE, 9)


def test_spares_that_never_said_hello_are_killed_at_the_end() -> None:
    desk = running()
    desk.state = desk.state  # the spare of `running` is warm: lose it, so that a cold one comes
    desk.lose("w1-2", state="waiting")
    desk.lose("w1-1", 5, slots=SLOTS)
    desk.status("w1-0", 5, "running")
    desk.hello("w1-3")
    recover(desk, 5)
    for worker in desk.seats():
        desk.say(worker, wire.Finished(n=9))
    cold = [w.name for w in desk.state.workers.values() if w.hello is None]
    assert cold and set(cold) <= desk.killed()


def test_capacity_is_respected_and_a_second_agent_fills_up() -> None:
    desk = Desk(world=3, spares=0).begin()
    desk.agent(capacity=2)
    assert len(desk.sent(wire.Spawn)) == 2
    desk.agent(capacity=1, agent="b")
    assert [body.seat for _, body in desk.sent(wire.Spawn)] == [2]


def test_no_room_for_a_rank_ends_the_run_with_a_cause() -> None:
    desk = Desk(world=2, spares=0, hello_s=5).begin()
    desk.agent(capacity=1)
    desk.hello("w1-0")
    for _ in range(6):
        desk.say("", wire.Renew())
        desk.tick(1)
    desk.lose("w1-0")
    end = desk.end()
    assert end is not None and end.outcome == "gave_up"
    assert end.cause is not None and "room" in end.cause.detail


# --- a failure ----------------------------------------------------------------------------


def test_a_spare_takes_the_seat_with_slots_record_and_a_donor() -> None:
    desk = running()
    desk.say("w1-1", wire.Recorded(seat=1, record=b"set-up"))
    desk.lose("w1-1", 5, slots=SLOTS)
    assert [worker for worker, _ in desk.sent(wire.Close)] == ["w1-0"]
    (noticed,) = desk.emitted(events.Noticed)
    assert (noticed.incident, noticed.generation, noticed.how) == (1, 1, "pidfd")
    desk.status("w1-0", 5, "running")
    (decided,) = desk.emitted(events.Decided)
    assert (decided.verdict, decided.rung, decided.n) == ("redo", "replace", 5)
    assert decided.replaced == ((1, "w1-1", "w1-2"),)
    ((worker, seat),) = desk.sent(wire.Seat)
    assert worker == "w1-2" and not seat.first and seat.record == b"set-up"
    assert seat.slots == {key: SLOTS[key] for key in ("before:5", "after:5", "result:5")}
    recover(desk, 5)
    assert desk.state.transfers == ((0, 1),)
    (moved,) = desk.emitted(events.Transferred)
    assert (moved.donor, moved.joiner, moved.digest) == (0, 1, "d")
    assert desk.sent(wire.Spawn)  # the spares are made up to their number again
    assert [e.incident for e in desk.emitted(events.GenerationOpened)] == [1]


def test_decisions_are_durable_before_anybody_hears_of_them() -> None:
    desk = running()
    desk.lose("w1-1", 5, slots=SLOTS)
    actions = desk.status("w1-0", 5, "running")
    kinds = [
        type(body).__name__ if (body := getattr(action, "body", None)) else type(action).__name__
        for action in actions
    ]
    assert kinds.index("Journal") < min(kinds.index("Decide"), kinds.index("Seat"))


def test_joiners_are_spread_over_the_donors() -> None:
    desk = running(world=4, spares=2)
    desk.lose("w1-1", 5, slots=SLOTS)
    desk.lose("w1-2", 5, slots=SLOTS)
    for worker in ("w1-0", "w1-3"):
        desk.status(worker, 5, "running")
    recover(desk, 5)
    assert desk.state.transfers == ((0, 1), (3, 2))


def test_without_a_spare_a_worker_is_started_anew() -> None:
    desk = running(spares=0)
    desk.lose("w1-1", 5, slots=SLOTS)
    desk.status("w1-0", 5, "running")
    assert desk.emitted(events.Decided)[0].rung == "respawn"
    ((_, spawn),) = desk.sent(wire.Spawn)
    assert not desk.sent(wire.Seat)
    desk.hello(spawn.worker)
    assert [worker for worker, _ in desk.sent(wire.Seat)] == [spawn.worker]


def test_all_alive_is_tried_again_and_the_same_bug_ends_the_run() -> None:
    desk = running(attempts_max=3)
    for attempt in range(1, 4):
        desk.status("w1-1", 0, "running", fault=RAISED)
        desk.status("w1-0", 0, "running")
        if attempt < 3:
            assert desk.emitted(events.Decided)[0].rung == "retry"
            recover(desk, 0)
    for worker in tuple(desk.state.workers):
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
    assert [body.generation for _, body in desk.sent(wire.Close)] == [2]
    assert {event.incident for event in desk.emitted(events.Noticed)} == {1}
    desk.status("w1-0", 5, "idle")
    ((worker, seat),) = desk.sent(wire.Seat)
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
    assert desk.state.transfers == ((0, 2),)


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
    desk.say("w1-1", wire.Status(generation=1, n=5, step=5, state="broken"))
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
    for worker in tuple(desk.state.workers):
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
    desk.say("", wire.Suspect(worker="", fault=TRANSPORT))
    assert len(desk.sent(wire.Close)) == 2 and not desk.killed()


def test_a_suspect_is_killed_and_its_reason_is_what_is_told() -> None:
    desk = running()
    desk.say("", wire.Suspect(worker="w1-1", fault=events.Fault(kind="hung", detail="stuck")))
    assert desk.killed() == {"w1-1"}
    desk.lose("w1-1", 5, slots=SLOTS)
    assert desk.emitted(events.WorkerLost)[0].fault.kind == "hung"
    assert len(desk.emitted(events.Noticed, history=True)) == 1


def test_who_is_late_to_be_ready_is_given_up() -> None:
    desk = running(join_s=5)
    desk.status("w1-0", 5, "running", fault=TRANSPORT)
    desk.status("w1-1", 5, "running")
    desk.say("w1-0", wire.Ready(generation=2, n=5))
    desk.say("", wire.Renew())
    desk.tick(6)
    assert desk.killed() == {"w1-1"}


def test_a_late_connection_is_tried_again_without_blame() -> None:
    desk = running(connect_s=3)
    desk.status("w1-0", 5, "running", fault=TRANSPORT)
    desk.status("w1-1", 5, "running")
    for worker in desk.seats():
        desk.say(worker, wire.Ready(generation=2, n=5))
    desk.tick(4)
    assert [body.generation for _, body in desk.sent(wire.Close)] == [2, 2]
    assert not desk.killed()


# --- restart and stop ---------------------------------------------------------------------


def test_when_all_are_gone_everybody_starts_from_the_newest_checkpoint() -> None:
    desk = running(spares=1)
    desk.say("w1-0", wire.Checkpointed(n=4, step=3, path="ck/4"))
    desk.say("", wire.Renew(beats={"w1-0": (6, 5, "running", 0.0)}))
    desk.lose("w1-0", 6)
    desk.lose("w1-1", 6)
    (decided,) = desk.emitted(events.Decided)
    assert decided.rung == "restart" and "2 committed step(s) lost" in decided.reason
    spawned = [body for _, body in desk.sent(wire.Spawn)]
    assert [body.seat for body in spawned] == [1, -1]  # the warm spare takes the other seat
    desk.hello(spawned[0].worker)
    seats = [body for _, body in desk.sent(wire.Seat)]
    assert [(b.first, b.n, b.checkpoint, b.generation) for b in seats] == [(True, 4, "ck/4", 2)] * 2


def test_a_restart_waits_until_the_survivors_are_reaped() -> None:
    desk = running(spares=0)
    desk.lose("w1-1", 5, slots={})
    desk.status("w1-0", 5, "running")
    assert desk.state.mode == "clearing" and desk.killed() == {"w1-0"}
    assert not desk.sent(wire.Spawn)
    desk.lose("w1-0", 5)
    assert len(desk.sent(wire.Spawn)) == 2


def test_restarts_that_get_nowhere_end() -> None:
    desk = running(spares=0, attempts_max=2)
    for _ in range(4):
        for worker in desk.seats():
            if worker:
                desk.lose(worker, 3)
        if desk.state.mode == "ended":
            break
        for worker in tuple(desk.state.workers):
            desk.hello(worker)
        desk.heal(0)
    end = desk.end()
    assert end is not None and end.outcome == "gave_up"


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ({}, "gave_up"),
        ({"kind": "exited", "exit_code": 1, "traceback": "T"}, "user_error"),
        ({"kind": "exited", "exit_code": 0}, "user_error"),
    ],
)
def test_a_death_before_the_first_step_ends_the_run_at_once(
    fault: dict[str, Any], outcome: str
) -> None:
    desk = running()
    desk.lose("w1-1", 0, "setup", **fault)
    assert desk.state.mode == "stopping" and not desk.sent(wire.Spawn)
    for worker in tuple(desk.state.workers):
        desk.lose(worker)
    end = desk.end()
    assert end is not None and end.outcome == outcome
    assert end.cause is not None and "before its first step" in end.cause.detail


def test_a_broken_connection_in_set_up_starts_everybody_again() -> None:
    desk = running()
    desk.status("w1-1", 0, "broken", fault=TRANSPORT)
    desk.status("w1-0", 0, "broken")
    for worker in ("w1-0", "w1-1"):
        desk.lose(worker, 0, "setup")
    assert desk.state.mode == "gathering" and desk.state.first and desk.state.attempts == 1


def test_a_drain_ends_interrupted_when_all_have_finished() -> None:
    desk = running()
    desk.stop()
    assert len(desk.sent(wire.Drain)) == 2
    for worker in desk.seats():
        desk.say(worker, wire.Finished(n=7))
    assert not any(body.ok for _, body in desk.sent(wire.Stop))
    for worker in tuple(desk.state.workers):
        desk.lose(worker, 7, "finished")
    end = desk.end()
    assert end is not None
    assert (end.outcome, end.exit_code) == ("interrupted", errors.EXIT_INTERRUPTED)


@pytest.mark.parametrize("how", ["twice", "late", "closed"])
def test_a_stop_that_cannot_wait_kills(how: str) -> None:
    desk = running(stop_s=5)
    if how == "closed":
        desk.status("w1-0", 5, "running", fault=TRANSPORT)
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
    assert {worker for worker, _ in desk.sent(wire.Drain)} == set(desk.seats())


def test_a_bad_exit_after_all_have_finished_is_the_users_error() -> None:
    desk = running()
    for worker in desk.seats():
        desk.say(worker, wire.Finished(n=9))
    desk.lose("w1-0", 9, "finished", kind="exited", detail="exit 3", exit_code=3)
    for worker in ("w1-1", "w1-2"):
        desk.lose(worker, 9, "finished", kind="exited", detail="exit 0")
    end = desk.end()
    assert end is not None and end.outcome == "user_error"
    assert end.cause is not None and end.cause.exit_code == 3


def test_a_worker_that_cannot_be_killed_ends_the_run() -> None:
    desk = running(status_s=2, stop_s=3, lease_s=100)
    desk.status("w1-0", 5, "running", fault=TRANSPORT)
    for _ in range(25):
        desk.tick(1)
    end = desk.end()
    assert end is not None and end.cause is not None and "could not be killed" in end.cause.detail


# --- what differs -------------------------------------------------------------------------


def test_ranks_that_compute_differently_do_not_start() -> None:
    desk = Desk(world=2, spares=0).begin()
    desk.agent()
    desk.hello("w1-0", isa="avx2")
    desk.hello("w1-1", isa="avx512")
    assert desk.state.mode == "stopping" and desk.state.end is not None
    assert desk.state.end.outcome == "user_error"
    assert desk.state.end.cause is not None and "isa: avx512 against avx2" in (
        desk.state.end.cause.detail
    )


def test_a_spare_that_computes_differently_is_replaced() -> None:
    desk = Desk(world=1, spares=1).begin()
    desk.agent()
    desk.hello("w1-0", isa="avx2")
    desk.hello("w1-1", isa="avx512")
    assert desk.killed() == {"w1-1"}
    assert any("isa" in note.text for note in desk.emitted(events.Note))


def test_ranks_that_protect_different_things_stop_the_run() -> None:
    desk = running()
    desk.say("w1-0", wire.Protected(schema="x", summary="Linear(4, 4)"))
    desk.say("w1-1", wire.Protected(schema="y", summary="Linear(4, 5)"))
    assert desk.state.end is not None and desk.state.end.outcome == "user_error"
    cause = desk.state.end.cause
    assert cause is not None and cause.kind == "mismatch"
    assert "Linear(4, 4)" in cause.detail and "Linear(4, 5)" in cause.detail


# --- values that pass through ---------------------------------------------------------------


def test_a_shared_value_is_made_once_and_kept_before_it_is_told() -> None:
    desk = running()
    desk.say("w1-0", wire.SharedAsk(name="id"))
    desk.say("w1-1", wire.SharedAsk(name="id"))
    assert [w for w, _ in desk.sent(wire.SharedMake, history=True)] == ["w1-0"]
    actions = desk.say("w1-0", wire.SharedMade(name="id", value=b"7"))
    assert type(actions[0]).__name__ == "Journal"
    assert {w for w, _ in desk.sent(wire.SharedIs)} == {"w1-0", "w1-1"}
    desk.say("w1-1", wire.SharedMade(name="id", value=b"8"))
    desk.say("w1-1", wire.SharedAsk(name="id"))
    assert desk.sent(wire.SharedIs) == [("w1-1", wire.SharedIs(name="id", value=b"7"))]


def test_a_maker_that_is_lost_or_late_loses_its_turn() -> None:
    desk = running(shared_s=2)
    desk.say("w1-0", wire.SharedAsk(name="id"))
    desk.say("w1-1", wire.SharedAsk(name="id"))
    desk.tick(3)
    assert [w for w, _ in desk.sent(wire.SharedMake)] == ["w1-1"]
    desk.lose("w1-1", 0, slots=SLOTS)
    assert [w for w, _ in desk.sent(wire.SharedMake)] == ["w1-0"]


def test_rendezvous_values_reach_every_other_member() -> None:
    desk = running(world=3)
    desk.say("w1-0", wire.Put(generation=1, key="k", value=b"v"))
    assert {w for w, _ in desk.sent(wire.Got)} == {"w1-1", "w1-2"}
    desk.say("w1-0", wire.Put(generation=0, key="life", value=b"v"))
    desk.lose("w1-2", 5, slots=SLOTS)
    for worker in ("w1-0", "w1-1"):
        desk.status(worker, 5, "running")
    bodies = [body for worker, body in desk.sent(type(desk.sent(wire.Seat)[0][1]))]
    assert bodies and desk.sent(wire.Got) == [
        ("w1-3", wire.Got(generation=0, key="life", value=b"v"))
    ]


# --- what is dropped ------------------------------------------------------------------------


def notes(desk: Desk) -> str:
    return " ".join(note.text for note in desk.emitted(events.Note))


@pytest.mark.parametrize(
    ("envelope", "says"),
    [
        ({"term": 0}, "term 0"),
        ({"incarnation": 0}, "incarnation 0"),
        ({"incarnation": 2}, "has not offered itself"),
        ({"seq": 1}, "was passed already"),
        ({"agent": "b"}, "has not offered itself"),
    ],
)
def test_frames_of_the_past_are_dropped_and_said(envelope: dict[str, int], says: str) -> None:
    desk = running()
    desk.say("w1-0", wire.Finished(n=1), **envelope)
    assert not desk.state.workers["w1-0"].finished
    assert says in notes(desk)


@pytest.mark.parametrize(
    "body",
    [
        wire.Ready(generation=1, n=0),
        wire.Joined(generation=1),
        wire.Put(generation=1, key="k", value=b""),
        wire.Status(generation=1, n=0, step=0, state="idle"),
    ],
)
def test_frames_of_a_closed_generation_are_dropped(body: Any) -> None:
    desk = running()
    desk.status("w1-1", 0, "running", fault=TRANSPORT)
    desk.status("w1-0", 0, "running")
    before = desk.state.workers["w1-0"]
    assert desk.state.generation == 2
    desk.say("w1-0", body)
    assert desk.state.workers["w1-0"] == before and not desk.sent(wire.Got)
    assert "of generation 1, now 2" in notes(desk)


def test_the_words_of_a_given_up_worker_count_no_more() -> None:
    desk = running()
    desk.say("", wire.Suspect(worker="w1-1", fault=events.Fault(kind="hung", detail="stuck")))
    desk.status("w1-1", 6, "idle")
    assert desk.state.workers["w1-1"].status is None
    desk.say("w1-9", wire.Hello(pid=1, fingerprint={}, address=""))
    assert "not of this run" in notes(desk)


def test_notes_about_dropped_frames_thin_out() -> None:
    desk = running()
    for _ in range(1000):
        desk.say("w1-0", wire.Finished(n=1), seq=1)
    assert len(desk.emitted(events.Note, history=True)) < 30


# --- leases and terms -------------------------------------------------------------------------


def test_workers_of_a_silent_agent_are_lost_when_its_lease_is_out() -> None:
    desk = running(lease_s=10)
    desk.feed(AgentGone(t_ns=desk.now_ns, agent="a", incarnation=1))
    desk.tick(9)
    assert desk.state.mode == "open"
    desk.tick(2)
    lost = desk.emitted(events.WorkerLost)
    assert {event.worker for event in lost} == {"w1-0", "w1-1", "w1-2"}
    assert {event.fault.kind for event in lost} == {"agent_lost"}
    desk.say("", wire.Renew())
    assert "lease is out" in notes(desk)


def test_an_agent_that_comes_back_hears_again_what_was_asked() -> None:
    desk = running()
    desk.status("w1-1", 0, "running", fault=TRANSPORT)
    desk.feed(AgentGone(t_ns=desk.now_ns, agent="a", incarnation=1))
    desk.agent("w1-0", "w1-1", "w1-2")
    assert {w for w, _ in desk.sent(wire.Close)} == {"w1-0", "w1-1"}


def test_workers_that_nobody_knows_are_killed() -> None:
    desk = running()
    desk.agent("w1-0", "w1-1", "w1-2", "w0-7")
    assert "w0-7" in desk.killed()


def later_term(desk: Desk, *alive: str, **begin: Any) -> Desk:
    later = Desk(world=desk.world, spares=1, term=2, lease_s=10)
    later.begin(journal=desk.journal(), **begin)
    later.agent(*alive)
    return later


def test_a_later_term_closes_the_old_generation_and_goes_on() -> None:
    desk = running()
    later = later_term(desk, "w1-0", "w1-1")
    assert {w for w, _ in later.sent(wire.Close)} == {"w1-0", "w1-1"}
    for worker in ("w1-0", "w1-1"):
        later.hello(worker)
        later.status(worker, 5, "running")
    assert later.decision().generation == 2 and later.state.n == 5
    assert later.emitted(events.Decided)[0].rung == "retry"


def test_a_later_term_knows_what_a_lost_worker_left_and_what_was_shared() -> None:
    desk = running()
    desk.say("w1-0", wire.SharedAsk(name="id"))
    desk.say("w1-0", wire.SharedMade(name="id", value=b"7"))
    desk.say("w1-1", wire.Recorded(seat=1, record=b"set-up"))
    desk.lose("w1-1", 5, slots=SLOTS)
    desk.status("w1-0", 5, "running")
    later = later_term(desk, "w1-0")
    later.hello("w1-0")
    later.status("w1-0", 5, "idle")
    (spare, _) = later.sent(wire.Spawn, history=True)[0][1].worker, None
    later.hello(spare)
    (seat,) = [body for _, body in later.sent(wire.Seat)]
    assert seat.slots["before:5"] == b"b5" and seat.record == b"set-up"
    later.say("w1-0", wire.SharedAsk(name="id"))
    assert later.sent(wire.SharedIs)[0][1].value == b"7"


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
    assert later.state.transfers == ((0, 1),)


def test_without_survivors_a_later_term_starts_at_once_from_the_checkpoint() -> None:
    desk = running()
    point = wire.Checkpointed(n=4, step=4, path="ck/4")
    later = later_term(desk, checkpoint=point)
    for worker in tuple(later.state.workers):
        later.hello(worker)
    first = later.sent(wire.Seat, history=True)[0][1]
    assert (first.generation, first.n, first.first, first.checkpoint) == (2, 4, True, "ck/4")
    assert set(later.state.workers) == {"w2-0", "w2-1", "w2-2"}


def test_a_later_term_waits_for_an_agent_that_may_still_live() -> None:
    desk = running()
    later = Desk(world=2, spares=1, term=2, lease_s=10).begin(journal=desk.journal())
    later.agent(agent="b")
    later.tick(5)
    assert later.state.mode == "awaiting"
    later.say("", wire.Renew(), agent="b")
    later.tick(6)
    assert later.state.mode == "gathering"


# --- the shape of handle --------------------------------------------------------------------


def test_handle_is_pure() -> None:
    desk = running()
    before = msgspec.msgpack.encode(desk.state)
    event = Received(
        t_ns=desk.now_ns,
        envelope=wire.Envelope(
            run="r", term=1, agent="a", incarnation=1, worker="", seq=99,
            body=wire.Lost(worker="w1-1", fault=TRANSPORT, n=1, state="running"),
        ),
    )  # fmt: skip
    first = handle(desk.state, event)
    assert msgspec.msgpack.encode(desk.state) == before
    second = handle(desk.state, event)
    assert first[1] == second[1]
    assert msgspec.msgpack.encode(first[0]) == msgspec.msgpack.encode(second[0])


def test_the_journal_can_be_written_and_read() -> None:
    desk = running()
    desk.say("w1-0", wire.SharedAsk(name="id"))
    desk.say("w1-0", wire.SharedMade(name="id", value=b"7"))
    entries = desk.journal()
    assert any(isinstance(entry, Opened) for entry in entries)
    assert any(isinstance(entry, SharedKept) for entry in entries)
    assert desk.state.wake_ns > desk.now_ns - S


def test_a_worker_that_its_agent_no_longer_has_is_lost_after_a_grace() -> None:
    desk = running(lease_s=10)
    desk.agent("w1-0", "w1-2")  # the connection broke; w1-1 died meanwhile, and Lost may follow
    assert desk.state.mode == "open"
    desk.tick(9)
    desk.say("", wire.Renew())
    assert desk.state.mode == "open"
    desk.tick(2)
    assert [event.worker for event in desk.emitted(events.WorkerLost)] == ["w1-1"]
    assert desk.state.mode == "closing"


def test_a_joiner_that_stands_elsewhere_is_replaced_before_the_decision() -> None:
    desk = running(spares=2)
    desk.lose("w1-1", 5, slots=SLOTS)
    desk.status("w1-0", 5, "running")
    desk.status("w1-2", 3, "joining", fault=TRANSPORT)
    desk.status("w1-0", 5, "idle")
    assert desk.killed() == {"w1-2"} and desk.state.mode == "closing"
    desk.lose("w1-2", 3)
    assert desk.state.mode == "gathering" and desk.seats() == ("w1-0", "w1-3")
