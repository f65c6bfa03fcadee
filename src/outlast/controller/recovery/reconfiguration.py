"""Reconfiguration: from a decision to an open generation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from outlast import events
from outlast.controller import checkpoint_tracking, membership, shared_values
from outlast.controller.audit import audit_protocol as audit
from outlast.controller.controller_state import (
    S_NS,
    ControllerState,
    ControllerTurn,
    WorkerRecord,
    differing_facts,
)
from outlast.controller.inputs import DecisionMade, Opened
from outlast.controller.lifecycle import run_ending
from outlast.controller.recovery import incident_response, partner_slots, shrinking
from outlast.controller.recovery.deputies import deputies_of, rank_0
from outlast.controller.save_schedule import interval_updates
from outlast.transport import messages


def start_over(turn: ControllerTurn, n: int, step: int) -> None:
    """Start all ranks in a new generation, before phase n+1; waiting workers keep their seats."""
    state = turn.state
    shrinking.begin_generation(state, ())
    shrinking.forget_groups(state)
    state.progress.begin_generation(n, step, "start")
    waiting = {worker.seat: worker.name for worker in state.members.workers.values()}
    seats = tuple(waiting.get(seat, "") for seat in range(state.world))
    state.members.set_seats(seats, {})
    shared_values.clear(turn)
    audit.begin_again(turn, n, step)
    turn.enter("gathering")


def gather_members(turn: ControllerTurn) -> None:
    """Fill the seats, announce the generation, and connect once all stand before phase n+1."""
    state = turn.state
    progress = state.progress
    if state.generation == 1 and state.placement.absent(state.members.agents):
        return  # no rank of a new job starts before all nodes are there
    membership.fill_seats(turn)
    if progress.first:
        membership.keep_spares(turn)
        _seat_everybody(turn)
    else:
        for seat in progress.joining:
            worker = state.occupant(seat)
            newcomer = worker and worker.hello and worker.member < state.generation
            if worker and newcomer and not worker.killed_ns:
                _seat(turn, worker)
    if state.mode == "gathering" and progress.have_all(state.world, partial(_is_ready, state)):
        _connect(turn)


def _is_ready(state: ControllerState, seat: int) -> bool:
    worker = state.members.workers.get(state.members.seats[seat])
    return worker is not None and worker.ready == state.progress.generation and not worker.killed_ns


def _may_be_seated(state: ControllerState, seat: int) -> bool:
    """Return whether a seat's worker waits in `init()`, or has received its seat."""
    worker = state.occupant(seat)
    return worker is not None and worker.hello is not None and not worker.killed_ns


def _seat_everybody(turn: ControllerTurn) -> None:
    state = turn.state
    first = state.occupant(0)
    if first is not None and first.member == state.generation:
        return
    if not state.progress.have_all(state.world, partial(_may_be_seated, state)):
        return
    occupants = [state.members.workers[name] for name in state.members.seats]
    if not _same_bits(turn, occupants) or checkpoint_tracking.search_checkpoint_again(turn):
        return
    journal(turn)
    for worker in occupants:
        _seat(turn, worker)


def _same_bits(turn: ControllerTurn, occupants: list[WorkerRecord]) -> bool:
    """Fix the fingerprint at the first start; spares that differ from it are unusable."""
    state = turn.state
    found = [worker.hello.fingerprint for worker in occupants if worker.hello]
    ours = state.members.settle_fingerprint(max(found, key=len))  # complete, if any is
    for worker in occupants:
        assert worker.hello is not None
        difference = differing_facts(ours, worker.hello.fingerprint)
        if difference:
            detail = (
                f"rank {worker.seat} computes differently from rank 0 ({difference}); nothing was"
                " started; make all ranks equal"
            )
            fault = turn.blame(worker, "mismatch", detail)
            run_ending.stop(turn, "user_error", fault, detail)
            return False
    for worker in tuple(state.members.workers.values()):
        if worker.seat < 0 and worker.hello is not None and not worker.killed_ns:
            membership.refuse_other_bits(turn, worker)
    return True


def journal(turn: ControllerTurn) -> None:
    """Make the decision durable before any message of the generation is sent."""
    state = turn.state
    progress = state.progress
    occupants = [state.occupant(seat) for seat in range(state.world)]
    turn.journal(
        DecisionMade(
            generation=state.generation,
            n=progress.n,
            step=progress.step,
            verdict=progress.verdict,
            seats=tuple(state.members.seats),
            slots=dict(state.members.abandoned_slots),
            agents=tuple(worker.agent if worker else "" for worker in occupants),
            joining=tuple(
                seat
                for seat, worker in enumerate(occupants)
                if (worker is None or not worker.whole) and seat not in progress.absent
            ),
            incident=state.incident.count,
            copy=progress.base,
            absent=progress.absent,
            units=state.units.units,
        )
    )


def slot_keys(n: int) -> tuple[str, str, str]:
    """Return the keys of the slots from which a joiner can restore its seat before phase n+1."""
    return f"before:{n}", f"after:{n}", f"result:{n}"


def open_frame(turn: ControllerTurn) -> messages.Open:
    """Return the message that opens the generation."""
    state = turn.state
    return messages.Open(
        generation=state.generation,
        n=state.progress.n,
        step=state.progress.step,
        ask=checkpoint_tracking.pending_request(turn),
    )


def seat_frame(turn: ControllerTurn, worker: WorkerRecord) -> messages.Seat:
    """Return the message that gives a worker its seat."""
    state = turn.state
    progress = state.progress
    first = progress.first  # then nothing is left of an earlier worker
    slots = {} if first else state.members.abandoned_slots.get(worker.seat, {})
    return messages.Seat(
        generation=state.generation,
        seat=worker.seat,
        world=state.world,
        n=progress.n,
        first=first,
        checkpoint=state.saves.checkpoint if first and progress.n else None,
        slots={
            key: value
            for key, value in slots.items()
            if key in slot_keys(progress.n) or key.startswith(shrinking.left_prefix(progress.n))
        },
        record=b"" if first else state.shared.records.get(worker.seat, b""),
    )


def _seat(turn: ControllerTurn, worker: WorkerRecord) -> None:
    generation = turn.state.generation
    worker = turn.change(
        worker.name, member=generation, seated=generation, since_ns=turn.now_ns, joined=None
    )
    turn.send(worker, seat_frame(turn, worker))
    turn.emit(
        events.WorkerSeated(
            t_ns=turn.now_ns, worker=worker.name, seat=worker.seat, generation=generation
        )
    )


def decide_frame(turn: ControllerTurn) -> messages.Decide:
    """Return the message with the decision for all workers."""
    state = turn.state
    progress = state.progress
    return messages.Decide(
        generation=state.generation,
        n=progress.n,
        verdict=progress.verdict,
        copy=progress.base,
    )


def ready(turn: ControllerTurn, worker: WorkerRecord, body: messages.WorkerReady) -> None:
    """Record that a worker is ready for the new generation."""
    state = turn.state
    progress = state.progress
    if body.n != progress.n:
        detail = f"rank {worker.seat} is ready before phase {body.n + 1}, not {progress.n + 1}"
        incident_response.give_up(turn, worker, turn.blame(worker, "torn", detail), "report")
        return
    if worker.ready == body.generation:
        return
    turn.change(worker.name, ready=body.generation)
    if not worker.whole and not progress.first:
        turn.emit(
            events.JoinerReady(
                t_ns=turn.now_ns,
                incident=state.incident.number,
                worker=worker.name,
                seat=worker.seat,
            )
        )


def _connect(turn: ControllerTurn) -> None:
    state = turn.state
    members = state.occupants()
    moves: tuple[tuple[int, int], ...] | None = ()
    if not state.progress.first:
        moves = shared_values.transfers(turn, [each.seat for each in members if each.whole])
    if moves is None:
        return
    joiners = () if state.progress.first else [each.seat for each in members if not each.whole]
    rebuilt = tuple(seat for seat in joiners if seat not in {joiner for _, joiner in moves})
    state.progress.connect(moves, rebuilt)
    shared_values.end_meetings(turn)
    turn.enter("connecting")
    partners = partner_slots.partners_of(state)
    by_agent: dict[str, list[WorkerRecord]] = {}
    for worker in members:
        if worker.joined is not None:
            worker = turn.change(worker.name, joined=None)
        by_agent.setdefault(worker.agent, []).append(worker)
    for ours in by_agent.values():
        turn.send_all(ours, connect_frame(turn, partners, ours))


def connect_timeout_s(turn: ControllerTurn) -> float:
    """Return the time limit of a connection attempt in seconds."""
    limits = turn.state.limits
    progress = turn.state.progress
    moves_state = progress.transfers or progress.rebuilt
    return limits.connect_s + (limits.transfer_s if moves_state else 0.0)


def connect_frame(
    turn: ControllerTurn, partners: Mapping[int, tuple[int, ...]], workers: Iterable[WorkerRecord]
) -> messages.Connect:
    """Return the message that makes these workers connect. `partners`: by rank."""
    progress = turn.state.progress
    workers = tuple(workers)
    deputies, ours = deputies_of(turn.state), {worker.seat for worker in workers}
    own_slots = shrinking.slots_of_absent(turn.state) if deputies else {}
    return messages.Connect(
        generation=progress.generation,
        n=progress.n,
        transfers=progress.transfers,
        timeout_s=connect_timeout_s(turn),
        copy=progress.base if progress.rebuilt else None,
        rebuilt=progress.rebuilt,
        partners=tuple(
            dict.fromkeys(partners[one.seat] for one in workers if one.seat in partners)
        ),
        absent=progress.absent,
        units=turn.state.units.units,
        deputies=tuple(deputies.items()),
        slots={seat: own for seat, own in own_slots.items() if deputies.get(seat) in ours},
    )


def _has_joined(state: ControllerState, seat: int) -> bool:
    worker = state.members.workers.get(state.members.seats[seat])
    return worker is not None and worker.joined is not None


def open_when_joined(turn: ControllerTurn) -> None:
    """Compare digests of sent and received state once all groups are connected, then open."""
    state = turn.state
    progress = state.progress
    incident = state.incident.number
    if not progress.have_all(state.world, partial(_has_joined, state)):
        return
    members = {worker.seat: worker for worker in state.occupants()}
    joined = {seat: one.joined for seat, one in members.items() if one.joined}
    turn.emit(events.Connected(t_ns=turn.now_ns, incident=incident, generation=state.generation))
    for donor, joiner in progress.transfers:
        if not _arrived(turn, donor, joiner, joined[donor], joined[joiner]):
            return
    for seat in progress.rebuilt:
        _, size_bytes, seconds = joined[seat].received.get(seat, ("", 0, 0.0))
        text = f"rank {seat} read {size_bytes} B from keepers' memory in {seconds:.2f} s"
        turn.note(text, seat=seat, level="info")
    audit.record_transfers(turn)
    turn.journal(
        Opened(
            generation=state.generation,
            n=progress.n,
            transfers=progress.transfers,
            joined=tuple(
                (seat, members[seat].name, members[seat].agent)
                for seat in (() if progress.first else progress.joining)
            ),
        )
    )
    progress.open()
    turn.enter("open")
    names = [worker.name for worker in members.values()]
    opened = state.members.announce(names, turn.now_ns, whole=True)
    turn.send_all(opened, open_frame(turn))
    turn.emit(
        events.GenerationOpened(
            t_ns=turn.now_ns, incident=incident, generation=state.generation, n=progress.n
        )
    )
    partner_slots.warn_of_losses(turn)
    incident_response.end_incident(turn)
    state.budgets.record_opened()
    state.members.refill_later()
    interval_updates.record_opened(turn)
    if progress.first:
        membership.keep_spares(turn)


def _arrived(
    turn: ControllerTurn,
    donor: int,
    joiner: int,
    sender: messages.Joined,
    receiver: messages.Joined,
) -> bool:
    state = turn.state
    sent, received = sender.sent.get(joiner), receiver.received.get(donor)
    if sent is None or received is None or sent[:2] != received[:2]:
        worker = state.members.workers[state.members.seats[joiner]]
        detail = (
            f"the state that rank {donor} sent to {worker.name} for rank {joiner} arrived"
            f" changed ({sent} was sent, {received} received) and was discarded"
        )
        incident_response.give_up(turn, worker, turn.blame(worker, "transfer", detail), "report")
        return False
    turn.emit(
        events.Transferred(
            t_ns=turn.now_ns,
            incident=state.incident.number,
            generation=state.generation,
            donor=donor,
            joiner=joiner,
            size_bytes=sent[1],
            seconds=received[2],
            digest=sent[0],
        )
    )
    return True


def repeat_request(turn: ControllerTurn, worker: WorkerRecord) -> None:
    """Repeat the last request to a worker whose agent reconnected; answers may repeat too."""
    state = turn.state
    if worker.killed_ns:
        turn.tell(worker.agent, messages.Kill(worker=worker.name, reason="it was given up"))
        return
    if worker.hello is None or worker.seat < 0 or worker.member != state.generation:
        return
    if state.mode == "closing":
        turn.send(worker, messages.Close(generation=state.generation, reason="repeated"))
    elif state.mode == "gathering":
        seated = worker.seated == state.generation
        turn.send(worker, seat_frame(turn, worker) if seated else decide_frame(turn))
    elif state.mode == "connecting":
        turn.send(worker, connect_frame(turn, partner_slots.partners_of(state), [worker]))
    elif state.mode == "open":
        turn.send(worker, open_frame(turn))
        if worker.seat == rank_0(state):
            interval_updates.send_intervals(turn, again=True)
    elif state.mode == "stopping" and state.ending.result is not None:
        turn.send(
            worker, messages.Stop(ok=state.ending.result.outcome == "done", reason="repeated")
        )


def deadline_ns(turn: ControllerTurn) -> int:
    """Return the deadline of the present mode, in nanoseconds of the controller's clock."""
    return turn.state.clock.since_ns + int(connect_timeout_s(turn) * S_NS)
