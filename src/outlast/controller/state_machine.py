"""The controller's state machine: one event changes the state and yields actions.

`handle(state, event) -> (state, actions)` is the whole controller. `launch/controller_shell.py`
feeds it real messages (`apply_all`, in place), `outlast.testing` feeds it millions of simulated
ones. docs/protocol.md lists its invariants (a) to (g). Each module behind it has one task:

=========================== ==================================================================
membership                  agents and workers: leases, starts, losses
node_placement              which node has which ranks
recovery/                   a failure, its answers, the decision, the next generation
lifecycle/                  start, takeover, restart and end of a run
shared_values               rendezvous values, shared values, records, schemas
checkpoint_tracking         saves on request, failed saves, the copy to begin again from
save_schedule/              save intervals from measured costs and failures
planned_migration           moves of ranks away from nodes with findings or notices
sentinels/                  slow ranks
deadlines                   deadlines, and the time of the next wake-up
=========================== ==================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from outlast.config import Limits
from outlast.controller import (
    checkpoint_tracking,
    deadlines,
    inputs,
    membership,
    planned_migration,
    shared_values,
    spare_preparation,
)
from outlast.controller.audit import audit_protocol as audit
from outlast.controller.controller_state import (
    ControllerState,
    ControllerTurn,
    MigrateOn,
    WorkerRecord,
)
from outlast.controller.lifecycle import node_release, notice_deadlines, run_ending, run_start
from outlast.controller.member_tables import AgentRecord, NodePlacement
from outlast.controller.recovery import (
    incident_response,
    partner_slots,
    reconfiguration,
    recovery_decision,
    shrinking,
)
from outlast.controller.recovery.recovery_policy import DEFAULT, RecoveryPolicy
from outlast.controller.save_schedule import interval_updates
from outlast.controller.save_schedule.save_tiers import SavePolicy
from outlast.controller.sentinels import device_moves, straggler_watch
from outlast.controller.state_parts import MODES, Mode
from outlast.transport import messages


def initial(
    world: int,
    spares: int,
    limits: Limits,
    policy: SavePolicy | None = None,
    migrate_on: MigrateOn = "",
    placement: NodePlacement | None = None,
    recovery: RecoveryPolicy = DEFAULT,
) -> ControllerState:
    """Return the state before BeginTerm of a job with `world` ranks and `spares` spare workers."""
    return ControllerState(
        world=world,
        spares=spares,
        limits=limits,
        policy=policy or SavePolicy(),
        recovery=recovery,
        migrate_on=migrate_on,
        placement=placement or NodePlacement(),
    )


def handle(
    state: ControllerState, event: inputs.Input
) -> tuple[ControllerState, list[inputs.Action]]:
    """Handle one event; `state` is unchanged, actions must be carried out in order."""
    return handle_all(state, (event,))


def handle_all(
    state: ControllerState, batch: Sequence[inputs.Input]
) -> tuple[ControllerState, list[inputs.Action]]:
    """Handle a batch in one turn, which decides after the last event; `state` is unchanged."""
    changed = state.copy()
    return changed, apply_all(changed, batch)


def apply_all(state: ControllerState, batch: Sequence[inputs.Input]) -> list[inputs.Action]:
    """Handle a batch of events in one turn, in place: for the owner of the only reference.

    A turn costs O(events), except where the mode changes: O(N) for N workers. A copy of the state
    costs O(N) always.
    """
    turn = ControllerTurn(state)
    runs = state.mode not in ("unborn", "ended")
    clock, greeted = state.clock, None
    for event in batch:
        clock.advance(event.t_ns)
        if isinstance(event, inputs.Received) and event.envelope.worker:
            envelope = event.envelope
            sender = (envelope.agent, envelope.term, envelope.incarnation)
            if clock.mode in ("unborn", "ended"):
                continue
            if greeted == sender or _is_accepted(turn, envelope):
                greeted = sender
                _from_worker(turn, envelope)
        else:
            greeted = None
            _take(turn, event)
    if runs:
        deadlines.expire(turn)
    node_release.release_hosts(turn)
    _advance(turn)
    notice_deadlines.meet(turn)
    deadlines.wake(turn)
    return turn.actions


def _take(turn: ControllerTurn, event: inputs.Input) -> None:
    if isinstance(event, inputs.BeginTerm):
        run_start.begin_term(turn, event)
    elif turn.state.mode not in ("unborn", "ended"):
        if isinstance(event, inputs.Received):
            _received(turn, event.envelope)
        elif isinstance(event, inputs.AgentLost):
            agent = turn.state.members.agents.get(event.agent)
            if agent is not None and agent.incarnation == event.incarnation:
                membership.on_agent_lost(turn, agent)
        elif isinstance(event, inputs.StopRequested):
            run_ending.on_stop_requested(turn, event.reason)
        elif isinstance(event, inputs.SaveRequested):
            checkpoint_tracking.request_save(turn, event.reason)
        elif isinstance(event, inputs.SchedulerChecked):
            planned_migration.record_scheduler(turn, event)
        elif isinstance(event, inputs.LauncherStalled):
            deadlines.extend_deadlines(turn, event.gap_ns)
        elif isinstance(event, inputs.CheckpointFound):
            run_start.on_checkpoint_found(turn, event)


def _advance(turn: ControllerTurn) -> None:
    """Apply every possible transition until none is left."""
    state = turn.state
    before = None
    while before != (state.mode, state.generation):
        before = (state.mode, state.generation)
        if state.mode == "awaiting":
            run_start.decide_when_agents_reported(turn)
        elif state.mode == "gathering":
            reconfiguration.gather_members(turn)
        elif state.mode == "connecting":
            reconfiguration.open_when_joined(turn)
        elif state.mode == "open":
            run_ending.finish_when_finished(turn)
            planned_migration.move_when_possible(turn)
            shrinking.take_back_when_possible(turn)
        elif state.mode == "closing":
            recovery_decision.decide_when_answered(turn)
        elif state.mode == "clearing":
            run_start.verify_when_clear(turn)
        elif state.mode == "stopping":
            run_ending.end_when_empty(turn)


def _received(turn: ControllerTurn, envelope: messages.MessageEnvelope) -> None:
    """Handle an agent's own message, unless it is late or repeated."""
    state = turn.state
    body = envelope.body
    if not _is_accepted(turn, envelope):
        return
    agent = state.members.agents.get(envelope.agent)
    sender = f"agent {envelope.agent}"
    if agent is None or envelope.incarnation > agent.incarnation:
        state.inbox.forget(sender)
    if not state.inbox.take(sender, envelope.seq):
        turn.drop(envelope, f"number {envelope.seq} is not newer than the last")
    elif isinstance(body, messages.AgentHello):
        for worker in membership.on_offered(turn, envelope, body):
            reconfiguration.repeat_request(turn, worker)
    elif agent is not None and agent.lapsed:
        turn.drop(envelope, "its agent's lease has expired")
    elif agent is not None:
        _from_agent(turn, envelope, agent)


def _is_accepted(turn: ControllerTurn, envelope: messages.MessageEnvelope) -> bool:
    """Return whether a message is of this term and of its agent's newest incarnation, and drop one
    that is not."""
    state = turn.state
    agent = state.members.agents.get(envelope.agent)
    if envelope.term < state.term.number:
        turn.drop(envelope, f"of term {envelope.term}, now {state.term.number}")
    elif agent is not None and envelope.incarnation < agent.incarnation:
        turn.drop(envelope, f"of incarnation {envelope.incarnation}, now {agent.incarnation}")
    elif (agent is None or envelope.incarnation > agent.incarnation) and not isinstance(
        envelope.body, messages.AgentHello
    ):
        turn.drop(envelope, "its agent has not sent Hello")
    else:
        return True
    return False


def _from_agent(
    turn: ControllerTurn, envelope: messages.MessageEnvelope, agent: AgentRecord
) -> None:
    body = envelope.body
    state = turn.state
    match body:
        case messages.Renew():
            membership.on_renewed(turn, agent, body)
            straggler_watch.record_own_times(turn, agent, body)
            spare_preparation.prepare_spares(turn)
        case messages.Spawned():
            membership.on_spawned(turn, agent, body)
        case messages.WorkerLostReport():
            worker = state.members.workers.get(body.worker)
            if worker is not None and worker.agent == agent.name:
                spare_preparation.worker_lost(turn, worker, body.fault)
                membership.on_worker_lost(turn, worker, body)
            elif not run_start.adopt_abandoned_slots(turn, agent, body):
                turn.drop(envelope, f"{body.worker} no longer belongs to this run")
        case messages.Suspect():
            worker = state.members.workers.get(body.worker)
            if worker is not None:
                fault = incident_response.explain_exit(worker, body.fault)
                incident_response.give_up(turn, worker, fault, "heartbeat")
            elif not body.worker and state.mode == "open":
                incident_response.record_fault(turn, body.fault, "heartbeat")
            else:
                turn.drop(
                    envelope,
                    f"{body.worker or 'a retry'}: not a live worker, or no open generation",
                )
        case messages.PartnerSlots():
            partner_slots.on_answer(turn, agent.name, body)
        case messages.NodeChecked():
            planned_migration.record_findings(turn, agent, body)
        case _:
            turn.drop(envelope, "an agent does not send this message")


class WorkerRule(NamedTuple):
    """Handling of one kind of message from workers. `needs_seat`: the sender must have a seat in
    the present generation. `of_generation`: the message must name that generation. `modes`: others
    drop it."""

    handle: Callable[[ControllerTurn, WorkerRecord, Any], None]
    needs_seat: bool = True
    of_generation: bool = False
    modes: frozenset[Mode] = frozenset(MODES)


def _protected(turn: ControllerTurn, worker: WorkerRecord, body: messages.StateProtected) -> None:
    shared_values.protected(turn, worker, body)
    straggler_watch.note_stages(turn, worker, body)


def _checkpointed(turn: ControllerTurn, _worker: WorkerRecord, body: messages.Checkpointed) -> None:
    checkpoint_tracking.record_duration(turn, body)
    if audit.record_copy(turn, body):
        checkpoint_tracking.on_checkpointed(turn, body)
    interval_updates.record_save(turn, body)


def _answered(turn: ControllerTurn, worker: WorkerRecord, body: messages.Status) -> None:
    if device_moves.begin_move(turn, worker, body):
        return
    planned_migration.begin_departure(turn, worker, body)
    shrinking.begin_return(turn, body)
    shrinking.note_groups(turn, worker, body.use)
    incident_response.on_answer(turn, turn.state.members.workers[worker.name], body)


def _finished(turn: ControllerTurn, worker: WorkerRecord, body: messages.Finished) -> None:
    turn.state.progress.reach(body.n, body.step)
    turn.change(worker.name, finished=True, exit_code=body.exit_code)


def _joined(turn: ControllerTurn, worker: WorkerRecord, body: messages.Joined) -> None:
    turn.change(worker.name, joined=body)


_NOT_CLOSING = frozenset(MODES) - {"closing"}
_OPEN: frozenset[Mode] = frozenset({"open"})

WORKER_RULES: dict[type[messages.AnyBody], WorkerRule] = {
    messages.WorkerHello: WorkerRule(membership.on_hello, needs_seat=False),
    messages.SharedValueRequest: WorkerRule(
        lambda turn, worker, body: shared_values.request_shared_value(turn, worker, body.name),
        needs_seat=False,
    ),
    messages.SharedValueMade: WorkerRule(
        lambda turn, _worker, body: shared_values.shared_value_ready(turn, body), needs_seat=False
    ),
    messages.Checkpointed: WorkerRule(_checkpointed, needs_seat=False),
    messages.SaveFailed: WorkerRule(
        lambda turn, _worker, body: checkpoint_tracking.on_save_failed(turn, body),
        needs_seat=False,
    ),
    messages.Status: WorkerRule(_answered, of_generation=True),
    messages.StateProtected: WorkerRule(_protected),
    messages.Recorded: WorkerRule(shared_values.record),
    messages.GroupsUsed: WorkerRule(
        lambda turn, worker, body: shrinking.note_groups(turn, worker, body.use)
    ),
    messages.Finished: WorkerRule(_finished),
    messages.HostMeets: WorkerRule(shared_values.meet, of_generation=True, modes=_NOT_CLOSING),
    messages.Put: WorkerRule(shared_values.put, of_generation=True, modes=_NOT_CLOSING),
    messages.WorkerReady: WorkerRule(
        reconfiguration.ready, of_generation=True, modes=frozenset({"gathering"})
    ),
    messages.Joined: WorkerRule(_joined, of_generation=True, modes=frozenset({"connecting"})),
    messages.Audited: WorkerRule(audit.on_report, of_generation=True, modes=_OPEN),
    messages.AuditNamed: WorkerRule(audit.on_named, of_generation=True, modes=_OPEN),
}


def _from_worker(turn: ControllerTurn, envelope: messages.MessageEnvelope) -> None:
    """Handle a worker's message that its agent has passed on, unless it is late or repeated."""
    state = turn.state
    worker = state.members.workers.get(envelope.worker)
    if not state.inbox.take(envelope.worker, envelope.seq):
        turn.drop(envelope, f"number {envelope.seq} is not newer than the last")
    elif worker is None or worker.agent != envelope.agent:
        turn.drop(envelope, "its worker no longer belongs to this run")
    elif worker.killed_ns:
        turn.drop(envelope, "its worker was given up")
    else:
        _apply_rule(turn, envelope, worker)


def _apply_rule(
    turn: ControllerTurn, envelope: messages.MessageEnvelope, worker: WorkerRecord
) -> None:
    body: Any = envelope.body
    rule = WORKER_RULES.get(type(body))
    generation, mode = turn.state.progress.generation, turn.state.clock.mode
    if rule is None:
        turn.drop(envelope, "a worker does not send this message")
    elif not rule.needs_seat:
        rule.handle(turn, worker, body)
    elif isinstance(body, messages.WorkerReady) and body.generation == 0:
        turn.change(worker.name, is_hot=True, fits=body.fits)
    elif worker.member != generation or worker.seat < 0:
        turn.drop(envelope, "its worker has no seat in this generation")
    elif (
        rule.of_generation
        and body.generation != generation
        and not incident_response.ends_its_worker(body)
    ):
        turn.drop(envelope, f"of generation {body.generation}, now {generation}")
    elif mode in rule.modes:
        rule.handle(turn, worker, body)
    elif mode == "closing":
        turn.drop(envelope, f"generation {generation} is closed")
    else:
        turn.drop(envelope, f"out of turn ({mode})")
