"""Start of a run: its first term, a later term's takeover, and restarts from a checkpoint."""

from __future__ import annotations

from outlast import events
from outlast.controller import checkpoint_tracking, planned_migration, shared_values
from outlast.controller.audit import audit_protocol as audit
from outlast.controller.controller_state import ControllerState, ControllerTurn
from outlast.controller.inputs import BeginTerm, CheckpointFound, DecisionMade, Opened, RankMigrated
from outlast.controller.lifecycle import run_ending
from outlast.controller.recovery import incident_response, reconfiguration, recovery_ladder
from outlast.controller.save_schedule import interval_updates
from outlast.transport import messages


def begin_term(turn: ControllerTurn, event: BeginTerm) -> None:
    """Restore what earlier terms made durable, and wait for workers that may be alive."""
    state = turn.state
    state.term.number = event.term
    checkpoint_tracking.set_checkpoint(turn, event.checkpoint)
    interval_updates.begin_measurements(turn)
    audit.restore_audits(turn, event.journal)
    decided: DecisionMade | None = None
    opened = False
    agents: set[str] = set()  # of the newest opened generation and of later decisions
    for entry in event.journal:
        if isinstance(entry, DecisionMade):
            if entry.verdict == "start":
                shared_values.clear(turn)
            decided = entry
            opened = False
            agents.update(entry.agents)
            state.progress.restore(entry, opened=False)
        elif isinstance(entry, Opened):
            opened = decided is not None and entry.generation == decided.generation
            agents = set(decided.agents) if decided is not None and opened else agents
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
    # A decision that was never sent may lack agents whose workers still run.
    state.term.fence_wait = tuple(sorted(agents - {""}))
    turn.enter("awaiting")


def _start(turn: ControllerTurn) -> None:
    checkpoint = turn.state.saves.checkpoint
    n, step = (checkpoint.n, checkpoint.step) if checkpoint else (0, 0)
    reconfiguration.start_over(turn, n, step)


def adopt_abandoned_slots(turn: ControllerTurn, body: messages.WorkerLostReport) -> bool:
    """Keep the slots of a worker that died while no controller ran. Return False if it had no
    seat."""
    state = turn.state
    if state.mode not in ("awaiting", "closing") or body.worker not in state.term.old_seats:
        return False
    seat = state.term.old_seats.index(body.worker)
    state.members.keep_slots(seat, body.slots)
    return True


def end_takeover(turn: ControllerTurn) -> None:
    """Forget the seats of the earlier term, after the first decision of this one."""
    turn.state.term.old_seats = ()


def decide_when_agents_reported(turn: ControllerTurn) -> None:
    """Decide once every agent of the old generation has sent its Hello, and strays are reaped."""
    state = turn.state
    if has_strays(state):
        return
    if state.term.fence_wait and all(
        name in state.members.agents for name in state.term.fence_wait
    ):
        decide_without(turn)


def has_strays(state: ControllerState) -> bool:
    """Return whether workers that nobody owns still live: they may have a generation of their
    own."""
    return any(worker.killed_ns for worker in state.members.workers.values())


def decide_without(turn: ControllerTurn) -> None:
    """Decide without the workers that have not reported: their agents' leases of the old term have
    expired."""
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
                detail=f"{name or 'no worker'} at rank {seat} did not survive the controller",
                worker=name,
                seat=seat,
                t_ns=turn.now_ns,
            )
            incident_response.add_cause(turn, lost)
            members.assign(seat, "")
        elif seat in state.term.joining:
            turn.change(name, whole=False)
    incident_response.close(turn, text)


def begin_restart(turn: ControllerTurn, reason: str) -> None:
    """Count the restart, and kill all workers that have seats."""
    state = turn.state
    farthest = max(state.progress.reached[0], state.progress.n)
    origin = state.saves.checkpoint.n if state.saves.checkpoint else 0
    state.budgets.count_restart(farthest, origin)
    checkpoint_tracking.begin_searches(turn)
    interval_updates.record_restart(turn)
    turn.enter("clearing")
    for worker in tuple(state.members.workers.values()):
        if worker.seat >= 0:
            turn.kill(worker.name, turn.blame(worker, "requested", reason))


def verify_when_clear(turn: ControllerTurn) -> None:
    """Search the newest checkpoint once no worker with a seat can write or remove one."""
    state = turn.state
    if any(worker.seat >= 0 for worker in state.members.workers.values()):
        return
    checkpoint_tracking.search_checkpoint(turn)


def on_checkpoint_found(turn: ControllerTurn, event: CheckpointFound) -> None:
    """Start from the newest whole copy, which may be older than the newest complete one."""
    state = turn.state
    if state.mode != "verifying" or event.generation != state.generation:
        return
    hoped = state.saves.checkpoint
    found = event.checkpoint
    checkpoint_tracking.set_checkpoint(turn, found)
    n, step = (found.n, found.step) if found else (0, 0)
    in_memory = found is not None and found.tier == "memory"
    if found is None and state.audit.undecided:
        detail = "replicas differ, and no copy from before the last agreement is whole"
        cause = recovery_ladder.root_fault(state.incident.faults)
        run_ending.stop(turn, "gave_up", cause, detail)
        return
    if hoped is not None and (n, in_memory) < (hoped.n, hoped.tier == "memory"):
        _correct(turn, hoped, n, step)
    interval_updates.record_found(turn)
    reconfiguration.start_over(turn, n, step)


def _correct(turn: ControllerTurn, hoped: messages.Checkpointed, n: int, step: int) -> None:
    """Record a second decision, since the copy of the first one is not whole."""
    state = turn.state
    what = "copy in memory" if hoped.tier == "memory" else "checkpoint"
    origin = f"the checkpoint at phase {n}" if n else "the beginning"
    turn.emit(
        events.Decided(
            t_ns=turn.now_ns,
            incident=state.incident.number,
            generation=state.generation,
            verdict="redo",
            rung="restart",
            n=n,
            step=step,
            replaced=(),
            reason=f"the {what} at phase {hoped.n} (step {hoped.step}) is not whole: all ranks"
            f" start from {origin} (step {step}) instead",
        )
    )


def start_unverified(turn: ControllerTurn) -> None:
    """Start from the newest complete checkpoint without verification, at the deadline."""
    state = turn.state
    turn.note(
        f"the checkpoints could not be read within {state.limits.join_s:g} s (limit join_s); the"
        " newest one is used without verification"
    )
    checkpoint = state.saves.checkpoint
    interval_updates.record_found(turn)
    reconfiguration.start_over(
        turn, checkpoint.n if checkpoint else 0, checkpoint.step if checkpoint else 0
    )
