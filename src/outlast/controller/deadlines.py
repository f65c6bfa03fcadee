"""Deadlines of the controller: what is due now, and the time of the next wake-up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from outlast import events
from outlast.controller import membership, node_placement, planned_migration, shared_values
from outlast.controller.audit import audit_protocol as audit
from outlast.controller.controller_state import S_NS, ControllerTurn, WorkerRecord
from outlast.controller.inputs import Wake
from outlast.controller.lifecycle import notice_deadlines, run_ending, run_start
from outlast.controller.recovery import (
    incident_response,
    partner_slots,
    reconfiguration,
    recovery_decision,
)

NEVER_NS = 1 << 62


def expire(turn: ControllerTurn) -> None:
    """Act on every deadline that has passed."""
    state = turn.state
    now_ns = turn.now_ns
    if now_ns < state.clock.wake_ns:
        return
    for agent in tuple(state.members.agents.values()):
        if not agent.lapsed and agent.until_ns() <= now_ns:
            membership.on_lease_expired(turn, agent)
    for worker in tuple(state.members.workers.values()):
        if worker.missing_ns and now_ns >= worker.missing_ns + _ns(state.limits.lease_s):
            membership.on_worker_lost_with_agent(
                turn, worker, f"{worker.name} was lost with its agent"
            )
    for worker in tuple(state.members.workers.values()):
        if worker.name in state.members.workers:
            _expire_worker(turn, worker)
    shared_values.give_up_late(turn)
    audit.expire(turn)
    drain_ns = state.ending.drain_ns
    if drain_ns and now_ns >= drain_ns and state.mode not in ("stopping", "ended"):
        run_ending.interrupt(turn, f"{state.ending.drain_reason} (not every rank drained in time)")
        return
    mode_ns = _mode_deadline(turn)
    if mode_ns is None or now_ns < mode_ns:
        return
    if state.mode == "awaiting":
        run_start.decide_without(turn)
    elif state.mode == "gathering":
        _no_room(turn)
    elif state.mode == "connecting":
        _connect_late(turn)
    elif state.mode == "closing":
        recovery_decision.fence_silent(turn)
    elif state.mode == "verifying":
        run_start.start_unverified(turn)
    elif state.mode == "stopping":
        run_ending.kill_all(turn, "it did not leave in time")


def extend_deadlines(turn: ControllerTurn, gap_ns: int) -> None:
    """Extend all deadlines by `gap_ns`, in which the controller itself was stalled."""
    clock = turn.state.clock
    turn.state.members.excuse(partial(clock.later, gap_ns=gap_ns))
    shared_values.excuse(turn, gap_ns)
    run_ending.excuse(turn, gap_ns)
    clock.excuse(gap_ns)


def _expire_worker(turn: ControllerTurn, worker: WorkerRecord) -> None:
    state = turn.state
    due_ns = _worker_deadline(turn, worker)
    if due_ns is None or turn.now_ns < due_ns:
        return
    if worker.killed_ns:
        _cannot_be_killed(turn, worker)
    elif worker.hello is None:
        detail = f"{worker.name} did not reach init() within {state.limits.hello_s:g} s"
        incident_response.give_up(turn, worker, turn.blame(worker, "hung", detail), "deadline")
    else:
        limit_s = state.limits.ready_s if worker.whole else state.limits.join_s
        detail = f"rank {worker.seat} was not ready within {limit_s:g} s"
        incident_response.give_up(turn, worker, turn.blame(worker, "hung", detail), "deadline")


def _worker_deadline(turn: ControllerTurn, worker: WorkerRecord) -> int | None:
    state = turn.state
    limits = state.limits
    if worker.missing_ns:
        return None  # unknown to its agent: lost after the grace period
    if worker.killed_ns:
        return worker.killed_ns + worker.kills * _ns(limits.kill_s)
    if worker.hello is None:
        # Before the first Hello the script may be one that never calls init().
        began_ns = max(worker.since_ns, state.members.greeted_ns)
        return began_ns + _ns(limits.hello_s) if state.members.greeted_ns else None
    waits_for_ready = (
        state.mode == "gathering"
        and worker.seat >= 0
        and worker.member == state.generation
        and worker.ready != state.generation
    )
    limit_s = limits.ready_s if worker.whole else limits.join_s
    return worker.since_ns + _ns(limit_s) if waits_for_ready else None


def _cannot_be_killed(turn: ControllerTurn, worker: WorkerRecord) -> None:
    """Send Kill once more; then end the run, since the worker may still act."""
    state = turn.state
    if state.mode == "stopping":
        if worker.kills > 1:
            turn.note(f"{worker.name} could not be killed; look for it on its host", worker.name)
            run_ending.end_now(turn)
            return
    elif worker.kills > 1:
        detail = f"{worker.name} could not be killed within {2 * state.limits.kill_s:g} s"
        run_ending.stop(turn, "gave_up", turn.blame(worker, "hung", detail), detail)
    turn.change(worker.name, kills=worker.kills + 1)
    reconfiguration.repeat_request(turn, turn.state.members.workers[worker.name])


def _connect_late(turn: ControllerTurn) -> None:
    """Close a generation that did not connect in time; silent workers are fenced later."""
    state = turn.state
    late = [w.seat for w in state.generation_members() if w.joined is None]
    kind: events.FaultKind = "transfer" if state.progress.transfers else "transport"
    detail = (
        f"generation {state.generation} was not connected after"
        f" {reconfiguration.connect_timeout_s(turn):g} s; no Joined from ranks {late}"
    )
    incident_response.record_fault(
        turn, events.Fault(kind=kind, detail=detail, t_ns=turn.now_ns), "deadline"
    )


def _no_room(turn: ControllerTurn) -> None:
    empty = sorted(node_placement.empty_seats(turn.state))
    limit_s = node_placement.room_limit_s(turn.state)
    detail = f"no agent had room for a worker at ranks {empty} within {limit_s:g} s"
    if turn.state.placement.agents and (lost := node_placement.lost_nodes(turn.state)):
        detail += (
            f"; without an answer: {', '.join(lost)}; checkpoints are kept; resume with the same"
            " command on healthy nodes"
        )
    fault = events.Fault(kind="agent_lost", detail=detail, t_ns=turn.now_ns)
    run_ending.stop(turn, "gave_up", fault, detail)


def _mode_deadline(turn: ControllerTurn) -> int | None:
    state = turn.state
    limits = state.limits
    if state.mode == "closing":
        silent = [w for w in state.generation_members() if recovery_decision.is_silent(turn, w)]
        limit_s = min(
            (recovery_decision.answer_limit_s(turn, worker) for worker in silent), default=0.0
        )
        return state.clock.since_ns + _ns(limit_s) if silent else None
    if state.mode == "connecting":
        return reconfiguration.deadline_ns(turn)
    if state.mode == "stopping":
        alive = any(not w.killed_ns for w in state.members.workers.values())
        return state.clock.since_ns + _ns(limits.stop_s) if alive else None
    if state.mode == "gathering" and node_placement.empty_seats(state):
        return state.clock.since_ns + _ns(node_placement.room_limit_s(state))
    if state.mode == "awaiting" and not run_start.has_strays(state):
        return state.clock.since_ns + _ns(limits.lease_s)
    if state.mode == "verifying":
        return state.clock.since_ns + _ns(limits.join_s)
    return None


def wake(turn: ControllerTurn) -> None:
    """Request a Tick before the next deadline if that has changed.

    All deadlines are computed when the mode has changed or a Tick was due, else those of the
    records that this turn has changed: a deadline that has moved on costs one Tick.
    """
    state = turn.state
    clock = state.clock
    touched = state.members.take_touched()
    if state.mode == "ended":
        return
    regime = (state.mode, clock.since_ns, state.generation, state.members.greeted_ns)
    if regime != clock.regime or clock.wake_ns <= turn.now_ns:
        due_ns = earliest(turn)
    else:
        due_ns = min([clock.wake_ns, *_of_records(turn, touched), *_of_parts(turn)])
        if state.mode in ("gathering", "awaiting"):
            due_ns = min(due_ns, _mode_deadline(turn) or NEVER_NS)
    is_news = due_ns != clock.wake_ns or clock.wake_ns <= turn.now_ns
    clock.wake_at(max(due_ns, turn.now_ns + 1) if is_news else clock.wake_ns, regime)
    if is_news and due_ns < NEVER_NS:
        turn.actions.append(Wake(t_ns=clock.wake_ns))


def earliest(turn: ControllerTurn) -> int:
    """Return the earliest of all deadlines, in nanoseconds."""
    members = turn.state.members
    records = _of_records(turn, (*members.agents, *members.workers))
    mode_ns = _mode_deadline(turn)
    return min([NEVER_NS, *records, *_of_parts(turn), mode_ns or NEVER_NS])


def _of_records(turn: ControllerTurn, names: Iterable[str]) -> Iterator[int]:
    """Yield the deadlines of these agents and workers."""
    state = turn.state
    agents, workers, mode = state.members.agents, state.members.workers, state.mode
    waits_for_ranks = mode in ("gathering", "closing")
    for name in names:
        if (agent := agents.get(name)) is not None and not agent.lapsed:
            yield agent.until_ns()
        if (worker := workers.get(name)) is None:
            continue
        is_due = worker.missing_ns or worker.killed_ns or worker.hello is None
        if not is_due and not waits_for_ranks:
            continue  # nearly every rank, nearly always
        if worker.missing_ns:
            yield worker.missing_ns + _ns(state.limits.lease_s)
        elif (at_ns := _worker_deadline(turn, worker)) is not None:
            yield at_ns
        is_asked = mode == "closing" and worker.seat >= 0
        is_asked = is_asked and worker.member == state.generation
        if is_asked and recovery_decision.is_silent(turn, worker):
            yield state.clock.since_ns + _ns(recovery_decision.answer_limit_s(turn, worker))


def _of_parts(turn: ControllerTurn) -> Iterator[int]:
    """Yield the deadlines of shared values, audits, partners' answers, moves and ends."""
    state = turn.state
    for making in state.shared.making.values():
        maker = state.members.workers.get(making.maker)
        if maker is not None and not maker.killed_ns:
            yield making.until_ns
    if names_ns := audit.due_ns(turn):
        yield names_ns
    if state.partners.waiting and partner_slots.due_ns(state) > turn.now_ns:
        yield partner_slots.due_ns(state)
    departs_ns = planned_migration.departure_ns(state) if state.findings.departing else 0
    if departs_ns > turn.now_ns and state.mode == "open":
        yield departs_ns
    if due_ns := notice_deadlines.due_ns(state):
        yield due_ns
    if state.ending.drain_ns and state.mode != "stopping":
        yield state.ending.drain_ns


def _ns(seconds: float) -> int:
    return int(seconds * S_NS)
