"""Agents and workers: leases, starts, seats and losses."""

from __future__ import annotations

import math

from msgspec.structs import replace

from outlast import events
from outlast.controller import checkpoint_tracking, node_placement, planned_migration, shared_values
from outlast.controller.controller_state import S_NS, ControllerTurn, WorkerRecord, differing_facts
from outlast.controller.lifecycle import run_ending
from outlast.controller.member_tables import AgentRecord
from outlast.controller.recovery import incident_response, partner_slots
from outlast.controller.recovery.root_fault import is_accident
from outlast.transport import messages

_NEARLY = 0.8
_REFILL_S = 30.0  # after Open, where no phase has been completed by then
_SETUP = ("starting", "waiting", "setup", "dry")


def spawn(turn: ControllerTurn, seat: int) -> str:
    """Start a worker and return its name; "" if there is no room or no respawn left."""
    state = turn.state
    members = state.members
    agent = node_placement.agent_with_room(turn, seat)
    first_ones = state.world + state.spares
    # Workers of a start of all ranks count against the bound on restarts instead.
    joins = not (state.progress.first and state.mode == "gathering")
    respawn = members.spawned >= first_ones and joins
    if agent is None or members.room(agent) <= 0 or (respawn and not state.respawns_left()):
        return ""
    if respawn:
        _count_respawn(turn)
    name = f"w{state.term.number}-{members.spawned}"
    members.spawned += 1
    members.add(
        WorkerRecord(
            name=name, agent=agent.name, seat=seat, is_spare=seat < 0, since_ns=turn.now_ns
        )
    )
    turn.tell(agent.name, messages.Spawn(worker=name, seat=seat, joins=joins))
    return name


def _count_respawn(turn: ControllerTurn) -> None:
    state = turn.state
    budget = int(state.limits.respawns_max)
    count = state.budgets.count_respawn(budget, state.progress.reached[0])
    if count == math.ceil(_NEARLY * budget):
        turn.note(
            f"{count} of {budget} respawns are used up without a phase completed between"
            " them (limit respawns_max); then the next rung of the policy applies"
        )


def fill(turn: ControllerTurn, seat: int) -> str:
    """Fill an empty seat with a warm spare, else the oldest starting spare, else a new worker.
    Return its name; "" if there is none."""
    state = turn.state
    spares = planned_migration.healthy_first(state, seat, node_placement.neighbours(state, seat))
    spares = spares or node_placement.cold_spares(state, seat)
    if spares:
        name = turn.change(spares[0].name, seat=seat, since_ns=turn.now_ns).name
    else:
        name = spawn(turn, seat)
    state.members.assign(seat, name)
    return name


def fill_seats(turn: ControllerTurn) -> None:
    """Fill the empty seats as far as there is room."""
    for seat in node_placement.empty_seats(turn.state):
        if not fill(turn, seat) and turn.state.progress.first:
            return  # any worker fits any seat, and there is none


def keep_spares(turn: ControllerTurn) -> None:
    """Spawn spares up to the configured number, unless they repeatedly die early."""
    state = turn.state
    for _ in range(node_placement.spares_missing(state)):
        if state.budgets.spares_failed >= state.limits.attempts_max or not spawn(turn, -1):
            return


def refill_spares(turn: ControllerTurn, body: messages.Renew) -> None:
    """Replace used spares once the generation has completed a phase, since starting a process
    during the redone step would slow down the recovery."""
    state = turn.state
    members = state.members
    if not members.refill_due or state.mode != "open" or state.ending.drain_ns:
        return
    moved = any(
        n > state.progress.n
        and (worker := members.workers.get(name)) is not None
        and worker.seat >= 0
        for name, (n, *_) in body.beats.items()
    )
    if moved or turn.now_ns - state.clock.since_ns > _REFILL_S * S_NS:
        keep_spares(turn)  # respawns_max may allow one spare now, and another after more phases
        members.refill_due = bool(state.progress.absent) and node_placement.is_short(state)


def on_spawned(turn: ControllerTurn, agent: AgentRecord, body: messages.Spawned) -> None:
    """Record that an agent has started a worker."""
    if (worker := turn.state.members.workers.get(body.worker)) is None:
        return
    # A Hello from before its start may have come later than its Spawn.
    worker = turn.change(worker.name, missing_ns=0) if worker.missing_ns else worker
    name, seat, pid, host = worker.name, worker.seat, body.pid, agent.host
    turn.emit(events.WorkerSpawned(t_ns=turn.now_ns, worker=name, seat=seat, pid=pid, host=host))


def on_hello(turn: ControllerTurn, worker: WorkerRecord, body: messages.WorkerHello) -> None:
    """Handle a worker that waits inside init(); refuse it if its fingerprint differs.

    A spare without a device of its own greets again when it has got one with its seat.
    """
    members, known = turn.state.members, worker.hello
    if known is not None and not known.fingerprint.keys() < body.fingerprint.keys():
        return
    worker = turn.change(worker.name, hello=body)
    if members.fingerprint is None and worker.member:  # a survivor of an earlier term
        members.settle_fingerprint(body.fingerprint)
        for name in tuple(members.unseated):
            if members.workers[name].hello is not None:
                refuse_other_bits(turn, members.workers[name])
    ranks = turn.state.placement.ranks_per_node
    if turn.state.placement.agents and 0 < body.devices < ranks:
        detail = (
            f"{worker.name} sees {body.devices} GPUs for {ranks} ranks of a node; nothing was"
            " trained; set --nproc-per-node to the GPUs that all nodes have, or hide the GPUs with"
            " CUDA_VISIBLE_DEVICES="
        )
        run_ending.stop(turn, "user_error", turn.blame(worker, "mismatch", detail), detail)
        return
    if known is None:
        members.greeted_ns = members.greeted_ns or turn.now_ns
        turn.emit(events.WorkerWarm(t_ns=turn.now_ns, worker=worker.name))
    if members.fingerprint is not None:
        refuse_other_bits(turn, worker)
    worker = members.workers[worker.name]
    if worker.seat < 0 and not worker.killed_ns:
        _overtake(turn, worker)


def _overtake(turn: ControllerTurn, spare: WorkerRecord) -> None:
    """Move a seat from a former spare that still starts to a spare that is warm."""
    state, members = turn.state, turn.state.members
    for seat in range(state.world):
        slow = state.occupant(seat)
        if (
            slow is not None
            and slow.is_spare
            and slow.hello is None
            and not slow.killed_ns
            and node_placement.has_gpu_for(state, spare.agent, seat, instead_of=slow.name)
        ):
            turn.change(slow.name, seat=-1)
            turn.change(spare.name, seat=seat, since_ns=turn.now_ns)
            members.assign(seat, spare.name)
            return


def refuse_other_bits(turn: ControllerTurn, worker: WorkerRecord) -> None:
    """Give a worker up whose fingerprint is not the run's."""
    assert turn.state.members.fingerprint is not None and worker.hello is not None
    difference = differing_facts(turn.state.members.fingerprint, worker.hello.fingerprint)
    if not difference:
        return
    text = f"{worker.name} computes differently ({difference}); another one replaces it"
    turn.note(text, worker.name, worker.seat)
    incident_response.give_up(turn, worker, turn.blame(worker, "mismatch", text), "report")


def on_offered(
    turn: ControllerTurn, envelope: messages.MessageEnvelope, body: messages.AgentHello
) -> list[WorkerRecord]:
    """Handle an agent's (re)connection. Return its known workers, which may have missed frames."""
    state = turn.state
    members = state.members
    known = members.agents.get(envelope.agent)
    reborn = known is not None and known.incarnation < envelope.incarnation
    if reborn:
        state.cuts.forget(envelope.agent)
        checkpoint_tracking.on_host_lost(turn)
    node_placement.admit(turn, envelope.agent, body.domain)
    members.refill_due |= known is None or reborn  # its room is for spares
    members.set_agent(
        AgentRecord(
            name=envelope.agent,
            incarnation=envelope.incarnation,
            host=body.host,
            capacity=body.capacity,
            lease_ns=int(max(body.lease_s, state.limits.lease_s) * S_NS),
            renewed_ns=turn.now_ns,
        )
    )
    turn.tell(envelope.agent, messages.Renewed(lease_s=state.limits.lease_s))
    partner_slots.ask_again(turn, envelope.agent)
    alive = set(body.workers)
    for worker in members.crew(envelope.agent):
        if worker.name in alive:
            turn.change(worker.name, missing_ns=0)
        elif reborn:
            detail = f"the agent of {body.host} reconnected without {worker.name}"
            # Its Spawn may have met the new incarnation: a stalled controller sends late.
            turn.tell(envelope.agent, messages.Kill(worker=worker.name, reason=detail))
            on_worker_lost_with_agent(turn, worker, detail)
        elif not worker.missing_ns:
            turn.change(worker.name, missing_ns=turn.now_ns)
    for name in body.workers:
        if name not in members.workers:
            _meet(turn, envelope.agent, name, is_spare=name in body.unseated)
    return members.crew(envelope.agent)


def _meet(turn: ControllerTurn, agent: str, name: str, *, is_spare: bool) -> None:
    """Handle a worker of an earlier term: it has a seat of the old generation, was never given
    one, or is fenced."""
    state = turn.state
    members = state.members
    is_member = state.mode == "awaiting" and name in members.seats
    worker = members.add(
        WorkerRecord(
            name=name,
            agent=agent,
            since_ns=turn.now_ns,
            seat=members.seats.index(name) if is_member else -1,
            is_spare=is_spare,
            member=state.generation if is_member else 0,
            # Its answer to Close says so where a member holds no state; no spare has one.
            whole=is_member and not is_spare,
        )
    )
    if not is_member and not (is_spare and state.mode not in ("stopping", "ended")):
        turn.kill(name, turn.blame(worker, "requested", "worker has no owner; killing it"))


def on_renewed(turn: ControllerTurn, agent: AgentRecord, body: messages.Renew) -> None:
    """Renew an agent's lease."""
    state = turn.state
    state.members.set_agent(replace(agent, renewed_ns=turn.now_ns, has_reported=True))
    turn.tell(agent.name, messages.Renewed(lease_s=state.limits.lease_s))
    for name, (n, step, word, _) in body.beats.items():
        worker = state.members.workers.get(name)
        if worker is None or worker.agent != agent.name:
            continue
        if (n, step) > state.progress.reached:
            state.progress.reach(n, step)
        if word == "finished" and not worker.finished:
            turn.change(name, finished=True)  # its own message may have been lost
        if worker.is_blocked != (name in body.blocked):
            turn.change(name, is_blocked=name in body.blocked)
    planned_migration.record_check(turn.state, agent, body)
    refill_spares(turn, body)


def on_agent_lost(turn: ControllerTurn, agent: AgentRecord) -> None:
    """Note a broken connection; until the lease expires, its workers may still run."""
    turn.state.members.set_agent(replace(agent, connected=False))
    checkpoint_tracking.on_host_lost(turn)


def on_lease_expired(turn: ControllerTurn, agent: AgentRecord) -> None:
    """Count the agent's workers as lost: it has killed them by now, or its host has failed."""
    turn.state.members.set_agent(replace(agent, connected=False, lapsed=True))
    checkpoint_tracking.on_host_lost(turn)
    detail = f"the agent of {agent.host} has not renewed its lease for {agent.lease_ns / S_NS:g} s"
    for worker in turn.state.members.crew(agent.name):
        on_worker_lost_with_agent(turn, worker, detail, agent.renewed_ns)


def on_worker_lost_with_agent(
    turn: ControllerTurn, worker: WorkerRecord, detail: str, since_ns: int = 0
) -> None:
    """Count a worker as lost because its agent is; its position is unknown."""
    lost = replace(turn.blame(worker, "agent_lost", detail), t_ns=since_ns or turn.now_ns)
    body = messages.WorkerLostReport(worker=worker.name, fault=lost, n=-1, state="")
    on_worker_lost(turn, worker, body, "lease")


def on_worker_lost(
    turn: ControllerTurn, worker: WorkerRecord, body: messages.WorkerLostReport, how: str = "pidfd"
) -> None:
    """Handle a worker that is dead and reaped with its session; its page slots are kept."""
    state = turn.state
    members, progress = state.members, state.progress
    members.remove(worker.name)
    state.inbox.forget(worker.name)
    shared_values.pass_on(turn, worker.name)
    fault = _why(turn, worker, body)
    turn.emit(
        events.WorkerLost(t_ns=turn.now_ns, worker=worker.name, seat=worker.seat, fault=fault)
    )
    if state.mode in ("stopping", "ended"):
        if state.ending.result is not None:
            ours = bool(worker.killed_ns)
            run_ending.lost_while_stopping(turn, fault, seated=worker.seat >= 0, ours=ours)
        return
    if worker.seat < 0:
        _spare_lost(turn, worker, fault)
        return
    state.partners.note_loss(worker.seat, fault.kind, body.fault.kind)
    if fault.kind == "unknown":  # its slots may be incomplete
        members.abandoned_slots[worker.seat] = {}
    else:
        members.keep_slots(worker.seat, body.slots)
    progress.reach(body.n, body.step)
    never_connected = state.mode in ("gathering", "connecting")
    if state.mode in ("clearing", "awaiting"):
        incident_response.record_fault(turn, fault, how)  # if the term waits for agents
        return
    retired = worker.killed_ns and fault.kind in ("transport", "torn", "requested")
    starting, external = never_connected or body.state in _SETUP, is_accident(fault)
    if progress.first and state.mode == "gathering" and worker.hello is None and external:
        _died_before_its_seat(turn, worker, fault, how)
    elif progress.first and not retired and not external and starting and state.is_new():
        _died_before_first_step(turn, worker, fault)
    elif not worker.killed_ns or state.mode != "closing":
        incident_response.record_fault(turn, fault, how)


def _spare_lost(turn: ControllerTurn, worker: WorkerRecord, fault: events.Fault) -> None:
    """Count a lost spare; in an open generation, start another one at once."""
    state = turn.state
    if fault.kind not in ("requested", "agent_lost"):
        young = worker.hello is None or turn.now_ns - worker.since_ns < state.limits.hello_s * S_NS
        state.budgets.count_spare(died_young=young)
    words = fault.traceback.strip().splitlines()
    last = f"; its last line: {words[-1].strip()}" if words else ""
    why = f"spare {worker.name} is lost ({fault.kind}: {fault.detail}{last})"
    if worker.hello is None and fault.kind != "requested":
        why += " before outlast.init(), where a spare has no rank yet: see"
        why += f" logs/spare/{worker.name}"
    if state.mode != "open" or state.ending.drain_ns:
        turn.note(why, worker.name)
        return
    before = state.members.spawned
    keep_spares(turn)
    if worker.agent in state.releases.closed:
        return  # its host leaves the run
    then = "another is started"
    if state.members.spawned == before:
        then = "no other is started now: there is no room, or no respawn is left"
        if (early := state.budgets.spares_failed) >= state.limits.attempts_max:
            then = "no other is started before the next recovery"
            then += f", since {early} in a row died early"
    turn.note(f"{why}; {then}", worker.name)


def _why(
    turn: ControllerTurn, worker: WorkerRecord, body: messages.WorkerLostReport
) -> events.Fault:
    """Return the first known fault, completed from the report of the death."""
    fault = worker.fault or body.fault
    detail = fault.detail
    if fault.kind == "exited" and not fault.exit_code and worker.seat >= 0 and not worker.finished:
        detail = f"{worker.name} exited before the run ended ({detail})"
    agent = turn.state.members.agents.get(worker.agent)
    return replace(
        fault,
        detail=detail,
        worker=worker.name,
        seat=worker.seat,
        host=fault.host or (agent.host if agent else ""),
        n=fault.n if fault.n >= 0 else body.n,
        traceback=fault.traceback or body.fault.traceback,
        t_ns=fault.t_ns or turn.now_ns,
    )


def _died_before_its_seat(
    turn: ControllerTurn, worker: WorkerRecord, fault: events.Fault, how: str
) -> None:
    """Replace a worker lost before init() while the others go on starting. At the limit per seat,
    record a failed start, which counts against the bound on restarts."""
    state = turn.state
    if state.budgets.count_early_death(worker.seat, state.limits.attempts_max):
        incident_response.record_fault(turn, fault, how)
        return
    turn.note(
        f"rank {worker.seat} was lost before init() ({fault.kind}: {fault.detail}); another worker"
        " takes its seat",
        worker.name,
    )


def _died_before_first_step(
    turn: ControllerTurn, worker: WorkerRecord, fault: events.Fault
) -> None:
    fault = replace(
        fault,
        detail=f"rank {worker.seat} died before its first step: {fault.detail}; nothing was"
        " committed since the start, and starting it again would end the same way",
    )
    user = fault.kind in ("raised", "contract", "exited", "mismatch")
    run_ending.stop(turn, "user_error" if user else "gave_up", fault, fault.detail)
