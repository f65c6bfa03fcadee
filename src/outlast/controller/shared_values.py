"""Values that pass through the controller: rendezvous, shared values, records, schemas, shards.

Each worker reports a digest of the shards that it holds (StateProtected). Ranks with the same
digest are each other's replicas: one of them can be the donor of another. Under DDP all ranks have
the same digest, under HSDP those of one place in the shard dimension, under 1-D FSDP none two.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from outlast.controller.controller_state import (
    S_NS,
    ControllerState,
    ControllerTurn,
    WorkerRecord,
)
from outlast.controller.inputs import (
    JournalEntry,
    RecordStored,
    Send,
    ShardsHeld,
    SharedValueStored,
)
from outlast.controller.lifecycle import run_ending
from outlast.controller.recovery import incident_response
from outlast.controller.state_parts import SharedValueInProgress
from outlast.transport import messages
from outlast.transport.rank_spans import RankSpan, has_rank, unpack_ranks
from outlast.transport.rendezvous_messages import are_whole, gathered, received

SHARED_MAX = 4096


def restore(turn: ControllerTurn, entry: JournalEntry) -> None:
    """Take over a value of an earlier term from its journal entry."""
    shared = turn.state.shared
    match entry:
        case SharedValueStored():
            shared.stored[entry.name] = entry.value
        case RecordStored():
            shared.records[entry.seat] = entry.record
            shared.calls = entry.calls or shared.calls
        case ShardsHeld():
            shared.holdings[entry.seat] = entry.shards
        case _:
            pass


def clear(turn: ControllerTurn) -> None:
    """Drop the values that belong to processes, since all ranks start again."""
    turn.state.shared.records = {}
    turn.state.shared.holdings = {}


def excuse(turn: ControllerTurn, gap_ns: int) -> None:
    """Extend every maker's deadline by the time of the launcher's stall."""
    making = turn.state.shared.making
    for name, one in tuple(making.items()):
        making[name] = replace(one, until_ns=one.until_ns + gap_ns)


def put(turn: ControllerTurn, sender: WorkerRecord, body: messages.Put) -> None:
    """Forward a rendezvous value to those of its ranks that are members, once to each agent."""
    state = turn.state
    places = (place for here in _places(state, body.ranks).values() for place in here)
    members = (state.members.workers[state.members.seats[rank]] for rank in places)
    turn.send_all((each for each in members if each.name != sender.name), received(body))


def meet(turn: ControllerTurn, sender: WorkerRecord, body: messages.HostMeets) -> None:
    """Keep what ranks of a host have for their group; pass everything on once all ranks of it are
    here."""
    state = turn.state
    shared, name, entries = state.shared, body.name, body.entries
    workers, seats, generation = state.members.workers, state.members.seats, state.generation
    missing = shared.missing.get(name) or sum([span.size for span in body.ranks])
    for rank, entry in entries.items():
        if not (0 <= rank < state.world and has_rank(body.ranks, rank)):
            continue
        worker = workers.get(seats[rank])
        if worker is None or worker.agent != sender.agent or worker.member != generation:
            continue
        if not worker.killed_ns:
            missing -= (name, rank) not in shared.meets
            shared.meets[name, rank] = entry
    shared.missing[name] = missing
    if missing:
        return
    del shared.missing[name]
    found = [shared.meets.pop((name, rank)) for rank in unpack_ranks(body.ranks)]
    if not are_whole(found, len(found)):
        detail = f"the ranks of group {name} have numbers for another count of ranks than its own"
        incident_response.give_up(turn, sender, turn.blame(sender, "mismatch", detail), "report")
        return
    for agent, places in _places(state, body.ranks).items():
        names = tuple(seats[rank] for rank in places)
        met = gathered(generation, name, found, places)
        turn.actions.append(Send(agent=agent, workers=names, body=met))


def end_meetings(turn: ControllerTurn) -> None:
    """Forget the groups that an earlier generation has not connected."""
    turn.state.shared.meets = {}
    turn.state.shared.missing = {}


def _places(state: ControllerState, ranks: Sequence[RankSpan]) -> dict[str, dict[int, int]]:
    """Return the members of a group, and their places in it, by agent."""
    found: dict[str, dict[int, int]] = {}
    workers, seats, generation = state.members.workers, state.members.seats, state.generation
    for place, rank in enumerate(unpack_ranks(ranks)):
        worker = workers.get(seats[rank]) if 0 <= rank < state.world else None
        if worker is None or worker.member != generation:
            continue
        if not worker.killed_ns:
            found.setdefault(worker.agent, {})[rank] = place
    return found


def request_shared_value(turn: ControllerTurn, sender: WorkerRecord, name: str) -> None:
    """Answer with the value, ask the worker to make it, or let the worker wait."""
    state = turn.state
    if name in state.shared.stored:
        turn.send(sender, messages.SharedValueReply(name=name, value=state.shared.stored[name]))
        return
    making = state.shared.making.get(name)
    if making is None:
        if len(state.shared.stored) + len(state.shared.making) >= SHARED_MAX:
            fault = turn.blame(
                sender, "raised", f"more than {SHARED_MAX} shared values; {name!r} was refused"
            )
            run_ending.fail(turn, fault)
            return
        _let_make(turn, name, sender, ())
    elif sender.name == making.maker:
        turn.send(
            sender, messages.SharedValueMake(name=name)
        )  # a repeated request: the first reply was lost
    elif sender.name not in making.askers:
        state.shared.making[name] = SharedValueInProgress(
            maker=making.maker, until_ns=making.until_ns, askers=(*making.askers, sender.name)
        )


def shared_value_ready(turn: ControllerTurn, body: messages.SharedValueMade) -> None:
    """Store the first value of a name; it is durable before it is sent to other workers."""
    state = turn.state
    making = state.shared.making.pop(body.name, None)
    if body.name not in state.shared.stored:
        state.shared.stored[body.name] = body.value
        turn.journal(SharedValueStored(name=body.name, value=body.value))
    waiting = (making.maker, *making.askers) if making else ()
    for name in waiting:
        worker = state.members.workers.get(name)
        if worker is not None:
            turn.send(
                worker,
                messages.SharedValueReply(name=body.name, value=state.shared.stored[body.name]),
            )


def pass_on(turn: ControllerTurn, lost: str) -> None:
    """Let the next waiting worker make the values of a lost maker. A live maker is never replaced,
    since its value may have to be unique."""
    state = turn.state
    for name, making in tuple(state.shared.making.items()):
        askers = tuple(asker for asker in making.askers if asker != lost)
        if making.maker != lost:
            state.shared.making[name] = replace(making, askers=askers)
            continue
        del state.shared.making[name]
        for index, asker in enumerate(askers):
            worker = state.members.workers.get(asker)
            if worker is not None and not worker.killed_ns:
                _let_make(turn, name, worker, askers[:index] + askers[index + 1 :])
                break


def give_up_late(turn: ControllerTurn) -> None:
    """Give up workers that take longer to make a value than a set-up may take."""
    state = turn.state
    for name, making in tuple(state.shared.making.items()):
        worker = state.members.workers.get(making.maker)
        if worker is not None and not worker.killed_ns and making.until_ns <= turn.now_ns:
            detail = (
                f"{worker.name} has been making the shared value {name!r} for"
                f" {state.limits.join_s:g} s (limit join_s)"
            )
            incident_response.give_up(turn, worker, turn.blame(worker, "hung", detail), "deadline")


def _let_make(
    turn: ControllerTurn, name: str, maker: WorkerRecord, askers: tuple[str, ...]
) -> None:
    until_ns = turn.now_ns + int(turn.state.limits.join_s * S_NS)
    turn.state.shared.making[name] = SharedValueInProgress(
        maker=maker.name, until_ns=until_ns, askers=askers
    )
    turn.send(maker, messages.SharedValueMake(name=name))


def record(turn: ControllerTurn, sender: WorkerRecord, body: messages.Recorded) -> None:
    """Store the record of a seat's set-up collectives."""
    state = turn.state
    turn.change(sender.name, calls=body.calls)
    shared = state.shared
    more = body.calls if len(body.calls) > len(shared.calls) else b""
    if shared.records.get(sender.seat) != body.record or more:
        shared.records[sender.seat] = body.record
        shared.calls = more or shared.calls
        turn.journal(RecordStored(seat=sender.seat, record=body.record, calls=more))


def protected(turn: ControllerTurn, sender: WorkerRecord, body: messages.StateProtected) -> None:
    """Record a rank's schema; stop the run before it begins if ranks protect different objects."""
    state = turn.state
    schemas = state.shared.schemas
    others = next(iter(schemas.values()), (sender.seat, body))
    if bool(others[1].stages) == bool(body.stages):  # each stage of a pipeline has its own
        others = schemas.setdefault(body.stages, (sender.seat, body))
    seat, known = others
    if (known.schema, known.stages) != (body.schema, body.stages):
        fault = turn.blame(
            sender,
            "mismatch",
            f"rank {sender.seat} protects other objects than rank {seat}: {body.summary!r}"
            f" against {known.summary!r}; nothing was committed by it; make every rank build the"
            " same model, optimizer and loader, or shard one model by fully_shard or"
            " parallelize_module; for stages of a pipeline, protect the schedule on every rank",
        )
        run_ending.stop(turn, "user_error", fault, fault.detail)
        return
    shards = state.shared.holdings.get(sender.seat)
    if shards is None:
        state.shared.holdings[sender.seat] = body.shards
        turn.journal(ShardsHeld(seat=sender.seat, shards=body.shards))
    elif shards != body.shards:
        stop_for_other_shards(turn, sender)


def stop_for_other_shards(turn: ControllerTurn, sender: WorkerRecord) -> None:
    """End the run, since a worker holds other shards than its rank's first worker."""
    detail = (
        f"{sender.name} at rank {sender.seat} holds other shards than the rank's first worker"
        " did; nothing was committed by it; build device meshes and shard modules from the rank"
        " and the world size alone"
    )
    fault = turn.blame(sender, "mismatch", detail)
    run_ending.stop(turn, "user_error", fault, fault.detail)


def donors_of(state: ControllerState, seat: int, whole: Collection[int]) -> list[int]:
    """Return those of the ranks `whole` that hold what `seat` holds."""
    holdings = state.shared.holdings
    return [rank for rank in sorted(whole) if holdings.get(rank) == holdings.get(seat)]


def without_donor(state: ControllerState, whole: Collection[int]) -> tuple[int, ...]:
    """Return the ranks beside `whole` whose shards are known, and held by none of `whole`.

    A rank that was lost in set-up has reported nothing: its next worker does (see `transfers`).
    """
    present = frozenset(whole)
    return tuple(
        seat
        for seat in range(state.world)
        if seat not in present
        and seat in state.shared.holdings
        and not donors_of(state, seat, present)
    )


def transfers(turn: ControllerTurn, whole: Collection[int]) -> tuple[tuple[int, int], ...] | None:
    """Return (donor, joiner) for every rank that is not whole, spread over the donors.

    A joiner without a donor reads its shards from the copy of the decision. Without a copy, give it
    up, which closes the generation, and return None.
    """
    state = turn.state
    present = frozenset(whole)
    absent = state.progress.absent
    joiners = [seat for seat in range(state.world) if seat not in present and seat not in absent]
    moves: list[tuple[int, int]] = []
    taken: dict[int, int] = {}
    for seat in joiners:
        donors = donors_of(state, seat, whole)
        if not donors and state.progress.base is not None:
            continue
        if not donors:
            worker = state.members.workers[state.members.seats[seat]]
            detail = f"no other rank is known to hold the shards of rank {seat}"
            incident_response.give_up(
                turn, worker, turn.blame(worker, "transfer", detail), "report"
            )
            return None
        donor = min(donors, key=lambda rank: (taken.get(rank, 0), rank))
        taken[donor] = taken.get(donor, 0) + 1
        moves.append((donor, seat))
    return tuple(moves)
