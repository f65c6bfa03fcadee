"""Start of a run: its first term, a later term's takeover, and restarts from a checkpoint."""

from __future__ import annotations

from msgspec.structs import replace

from outlast import events
from outlast.controller import (
    checkpoint_tracking,
    node_placement,
    planned_migration,
    shared_values,
)
from outlast.controller.audit import audit_protocol as audit
from outlast.controller.controller_state import S_NS, ControllerState, ControllerTurn
from outlast.controller.inputs import (
    BeginTerm,
    CheckpointFound,
    DecisionMade,
    DrainRequested,
    EndDecided,
    GroupsNoted,
    NodeJoined,
    Opened,
    RankMigrated,
    RungTaken,
    TermBegan,
)
from outlast.controller.lifecycle import run_ending
from outlast.controller.member_tables import AgentRecord
from outlast.controller.recovery import incident_response, reconfiguration
from outlast.controller.recovery.root_fault import root_fault
from outlast.controller.save_schedule import interval_updates
from outlast.transport import messages

# Newest reports of workers that an agent sends again to the controller of a new term.
REPEATED_REPORTS = (
    messages.WorkerHello,
    messages.Status,
    messages.StateProtected,
    messages.Recorded,
    messages.GroupsUsed,
    messages.Finished,
)


def begin_term(turn: ControllerTurn, event: BeginTerm) -> None:
    """Restore what earlier terms made durable, and wait for workers that may be alive."""
    state = turn.state
    state.term.number = event.term
    state.term.succession = event.succession
    checkpoint_tracking.set_checkpoint(turn, event.checkpoint)
    interval_updates.begin_measurements(turn)
    audit.restore_audits(turn, event.journal)
    decided: DecisionMade | None = None
    opened = False
    agents: set[str] = set()  # of the newest opened generation and of later decisions
    drain = ""
    for entry in event.journal:
        if isinstance(entry, DecisionMade):
            if entry.verdict == "start":
                shared_values.clear(turn)
            decided = entry
            opened = False
            agents.update(entry.agents)
            state.progress.restore(entry, opened=False)
            state.units.restore(entry)
        elif isinstance(entry, GroupsNoted):
            state.units.restore(entry)
        elif isinstance(entry, Opened):
            opened = decided is not None and entry.generation == decided.generation
            if decided is not None and opened:
                decided = _with_joined(decided, entry)
                agents = set(decided.agents)
        elif isinstance(entry, NodeJoined):
            node_placement.restore(turn, entry)
        elif isinstance(entry, RankMigrated):
            planned_migration.restore_moves(turn, entry)
        elif isinstance(entry, RungTaken):
            t_ns = min(entry.t_ns, turn.now_ns)
            state.budgets.take_rung(entry.rung, entry.failure, t_ns, entry.failed)
        elif isinstance(entry, DrainRequested):
            drain = entry.reason
        elif isinstance(entry, EndDecided):
            state.term.end = entry
        elif isinstance(entry, TermBegan) and not entry.takes_over:
            drain, state.term.end = "", None
        else:
            shared_values.restore(turn, entry)
    if event.succession is None:  # the job was started again: what ended is over
        drain, state.term.end = "", None
    if decided is None:
        _start(turn)
        return
    if drain:
        run_ending.restore_drain(turn, drain)
    state.progress.restore(decided, opened=opened)
    incident_response.restore_count(turn, decided.incident)
    state.members.set_seats(decided.seats, dict(decided.slots))
    state.term.old_seats, state.term.old_agents = decided.seats, decided.agents
    state.term.joining = () if opened else decided.joining
    state.term.is_open = opened and not drain and state.term.end is None
    if decided.joining and not opened:  # any node may have taken these seats since
        agents.update(state.placement.agents)
    # A decision that was never sent may lack agents whose workers still run.
    state.term.fence_wait = tuple(sorted(agents - {""}))
    turn.enter("awaiting")


def _with_joined(decided: DecisionMade, opened: Opened) -> DecisionMade:
    """Return a decision with the workers that have taken seats between it and the opening."""
    seats, agents = list(decided.seats), list(decided.agents)
    for seat, worker, agent in opened.joined:
        seats[seat], agents[seat] = worker, agent
    return replace(decided, seats=tuple(seats), agents=tuple(agents))


def _start(turn: ControllerTurn) -> None:
    checkpoint = turn.state.saves.checkpoint
    n, step = (checkpoint.n, checkpoint.step) if checkpoint else (0, 0)
    reconfiguration.start_over(turn, n, step)


def adopt_abandoned_slots(
    turn: ControllerTurn, agent: AgentRecord, body: messages.WorkerLostReport
) -> bool:
    """Keep the slots of a worker that died while no controller ran, and the cause. Return False if
    it had no seat."""
    state = turn.state
    if state.mode not in ("awaiting", "closing") or body.worker not in state.term.old_seats:
        return False
    seat = state.term.old_seats.index(body.worker)
    state.members.keep_slots(seat, body.slots)
    fault = replace(body.fault, worker=body.worker, seat=seat, host=body.fault.host or agent.host)
    if state.mode == "awaiting":
        incident_response.note_early_loss(turn, fault)
    return True


def end_takeover(turn: ControllerTurn) -> None:
    """Forget the seats of the earlier term, after the first decision of this one."""
    turn.state.term.old_seats = ()


def decide_when_agents_reported(turn: ControllerTurn) -> None:
    """Adopt the open generation, or decide, once every agent of the old generation has reported,
    and strays are reaped."""
    state = turn.state
    agents = [state.members.agents.get(name) for name in state.term.fence_wait]
    if has_strays(state) or not agents or not all(one and one.has_reported for one in agents):
        return
    if _is_unharmed(state):
        _adopt_generation(turn)
    else:
        decide_without(turn)


def has_strays(state: ControllerState) -> bool:
    """Return whether workers that nobody owns still live: they may have a generation of their
    own."""
    return any(worker.killed_ns for worker in state.members.workers.values())


def _is_unharmed(state: ControllerState) -> bool:
    """Return whether the old generation is open for all ranks, as far as this term can know.

    No worker of it is lost, none has left it (a Close of the former controller may have reached
    some), and set-up is over: what ranks exchange in it may have been lost with the former
    controller. A report that comes later is the failure that it is in any open generation.
    """
    progress = state.progress
    is_set_up = (
        not progress.first
        or progress.reached[0] > progress.n  # all ranks have voted
        or len(state.shared.records) == state.world
    )
    absent = state.progress.absent
    seats = [name for seat, name in enumerate(state.members.seats) if seat not in absent]
    workers = (state.members.workers.get(name) for name in seats)
    return (
        state.term.is_open
        and is_set_up
        and not state.incident.early
        and all(
            one is not None
            and one.hello is not None
            and not one.missing_ns
            and (one.status is None or one.status.generation != state.generation)
            for one in workers
        )
    )


def _adopt_generation(turn: ControllerTurn) -> None:
    """Go on with the open generation of the former controller: no rank has to stop."""
    state = turn.state
    text = _took_over(state)
    end_takeover(turn)
    turn.enter("open")
    if not _close_for_requests(turn):
        members = state.occupants()
        turn.send_all(members, reconfiguration.open_frame(turn))  # the former term's may be lost
    state.members.refill_later()
    interval_updates.send_intervals(turn, again=True)
    turn.note(
        f"{text}; all {state.world - len(state.progress.absent)} ranks train on in generation"
        f" {state.generation}, and have not waited for it"
    )


def _close_for_requests(turn: ControllerTurn) -> bool:
    """Close an adopted generation for a drain or a save that was requested before the adoption;
    return whether there was one. The next generation carries it out."""
    ending = turn.state.ending
    if ending.drain_ns:
        fault = events.Fault(kind="requested", detail=ending.drain_reason, t_ns=turn.now_ns)
    elif turn.state.saves.is_requested:
        detail = "a checkpoint was requested while the controller changed"
        fault = events.Fault(kind="save", detail=detail, t_ns=turn.now_ns)
    else:
        return False
    incident_response.record_fault(turn, fault, "report")
    return True


def _took_over(state: ControllerState) -> str:
    """Return who is the controller now, and from when on there was none."""
    number, change = state.term.number, state.term.succession
    if change is None:
        return f"the controller came back as term {number}"
    silent_s = max(0, state.clock.since_ns - change.silent_ns) / S_NS
    return (
        f"{change.host} is the controller, term {number}, after {silent_s:.1f} s without an answer"
        f" of the one on {change.before}"
    )


def _host_of(state: ControllerState, seat: int) -> str:
    """Return the host of a rank's agent in the earlier term, or its own node's."""
    agent = state.term.old_agents[seat] if seat < len(state.term.old_agents) else ""
    return state.members.agents[agent].host if agent in state.members.agents else agent


def decide_without(turn: ControllerTurn) -> None:
    """Decide without the workers that have not reported: their agents' leases of the old term have
    expired."""
    state = turn.state
    members, term = state.members, state.term
    if term.end is not None:
        state.progress.reach(term.end.n, term.end.step)
        run_ending.stop(turn, term.end.outcome, term.end.cause, "the run has ended")
        return
    alive = [worker for worker in members.workers.values() if worker.seat >= 0]
    if not alive and state.ending.drain_ns:
        run_ending.interrupt(turn, state.ending.drain_reason)
        return
    if not alive and term.succession is None:  # the job was started again
        _start(turn)
        return
    text = _took_over(state)
    turn.enter("closing")
    explained = {fault.seat for _, fault in state.incident.early}
    lost: list[tuple[str, events.Fault]] = []
    for seat, name in enumerate(members.seats):
        worker = members.workers.get(name)
        if worker is None and seat in state.progress.absent:
            continue
        if worker is None:
            host = _host_of(state, seat)
            detail = f"{name or 'no worker'} at rank {seat} did not survive the controller; {text}"
            fault = events.Fault(
                kind="agent_lost",
                detail=detail,
                worker=name,
                seat=seat,
                host=host,
                t_ns=term.succession.silent_ns if term.succession else turn.now_ns,
            )
            if seat not in explained:
                lost.append(("lease", fault))
                state.partners.note_loss(seat, fault.kind, fault.kind)
            members.assign(seat, "")
        elif seat in term.joining:
            turn.change(name, whole=False)
    if not lost and not explained:
        detail = f"{text}; generation {state.generation} could not go on without it"
        lost = [("report", events.Fault(kind="controller_lost", detail=detail, t_ns=turn.now_ns))]
    incident_response.begin_incident(turn, lost)
    incident_response.close(turn, text)


def begin_restart(turn: ControllerTurn, reason: str, *, from_disk: bool = False) -> None:
    """Count the restart, and kill all workers that have seats. `from_disk`: copies in memory are
    left out."""
    state = turn.state
    farthest = max(state.progress.reached[0], state.progress.n)
    checkpoint_tracking.begin_searches(turn, from_disk=from_disk)
    origin = state.saves.checkpoint.n if state.saves.checkpoint else 0
    state.budgets.count_restart(farthest, origin)
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
        cause = root_fault(state.incident.faults)
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
    checkpoint_tracking.end_searches(turn)
    interval_updates.record_found(turn)
    reconfiguration.start_over(
        turn, checkpoint.n if checkpoint else 0, checkpoint.step if checkpoint else 0
    )
