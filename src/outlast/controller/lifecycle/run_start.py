"""First turn of a term: a fresh job, a resumed job, or one with live workers."""

from __future__ import annotations

from outlast import events
from outlast.controller import checkpoint_tracking, planned_migration, shared_values
from outlast.controller.audit import audit_protocol as audit
from outlast.controller.controller_state import ControllerTurn
from outlast.controller.inputs import BeginTerm, DecisionMade, Opened, RankMigrated
from outlast.controller.recovery import incident_response, reconfiguration
from outlast.controller.save_schedule import interval_updates
from outlast.transport import messages


def begin_term(turn: ControllerTurn, event: BeginTerm) -> None:
    """Take over what earlier terms made durable, and wait for who may still be alive."""
    state = turn.state
    state.term.number = event.term
    checkpoint_tracking.set_checkpoint(turn, event.checkpoint)
    interval_updates.begin_measurements(turn)
    audit.restore_audits(turn, event.journal)
    decided: DecisionMade | None = None
    opened = False
    for entry in event.journal:
        if isinstance(entry, DecisionMade):
            if entry.verdict == "start":
                shared_values.clear(turn)
            decided = entry
            opened = False
        elif isinstance(entry, Opened):
            opened = decided is not None and entry.generation == decided.generation
        elif isinstance(entry, RankMigrated):
            planned_migration.restore_moves(turn, entry)
        else:
            shared_values.restore(turn, entry)
    if decided is None:
        _start(turn)
        return
    state.progress.restore(decided, opened=opened)
    incident_response.restore_count(turn, decided.incident)
    state.members.set_seats(decided.seats, dict(decided.slots))
    state.term.old_seats = decided.seats
    state.term.joining = () if opened else decided.joining
    state.term.fence_wait = tuple(sorted(set(decided.agents)))
    turn.enter("awaiting")


def _start(turn: ControllerTurn) -> None:
    checkpoint = turn.state.saves.checkpoint
    n, step = (checkpoint.n, checkpoint.step) if checkpoint else (0, 0)
    reconfiguration.start_over(turn, n, step)


def adopt_abandoned_slots(turn: ControllerTurn, body: messages.WorkerLostReport) -> bool:
    """Take over what a worker left that died while no controller lived. Return False if it had no
    seat."""
    state = turn.state
    if state.mode not in ("awaiting", "closing") or body.worker not in state.term.old_seats:
        return False
    seat = state.term.old_seats.index(body.worker)
    state.members.keep_slots(seat, body.slots)
    return True


def end_takeover(turn: ControllerTurn) -> None:
    """Forget who had the seats when the earlier term ended: a decision has been made since."""
    turn.state.term.old_seats = ()


def decide_when_agents_reported(turn: ControllerTurn) -> None:
    """Once every agent of the old generation has spoken, it is known who is left of it."""
    state = turn.state
    if state.term.fence_wait and all(
        name in state.members.agents for name in state.term.fence_wait
    ):
        decide_without(turn)


def decide_without(turn: ControllerTurn) -> None:
    """Decide without the workers that have not reported by now: their agents' leases of the old
    term have expired."""
    state = turn.state
    members = state.members
    alive = [worker for worker in members.workers.values() if worker.seat >= 0]
    if not alive:
        _start(turn)
        return
    turn.enter("closing")
    text = f"the controller came back as term {state.term.number}"
    fault = events.Fault(kind="transport", detail=text, t_ns=turn.now_ns)
    incident_response.begin_incident(turn, fault)
    for seat, name in enumerate(members.seats):
        worker = members.workers.get(name)
        if worker is None:
            lost = events.Fault(
                kind="agent_lost",
                detail=f"{name or 'nobody'} at rank {seat} did not outlive the controller",
                worker=name,
                seat=seat,
                t_ns=turn.now_ns,
            )
            incident_response.add_cause(turn, lost)
            members.assign(seat, "")
        elif seat in state.term.joining:
            turn.change(name, whole=False)
    incident_response.close(turn, text)
