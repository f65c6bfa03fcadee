"""Fewer ranks, and more again: ranks without a place leave, and come back between two steps.

A rank leaves where nobody can take it: no spare, no room for a new worker. Ranks that need each
other leave together (rank_units.py): healthy ones lose their seats, and their hosts have room for
spares. Then they are absent; the generations that follow have no workers for them, and their own
state is kept as it was. A unit comes back when warm spares can take all its ranks: one rank stops
at a boundary, and all go on with it in a new generation. Its workers get weights from a replica,
their places in the script from the slots of ranks that were present, and their random generators
from their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from outlast import events
from outlast.controller import planned_migration
from outlast.controller.controller_state import ControllerState, ControllerTurn, WorkerRecord
from outlast.controller.inputs import GroupsNoted
from outlast.controller.recovery import incident_response
from outlast.controller.recovery.rank_units import Units, find_units, units_of, why_rooted
from outlast.transport import messages
from outlast.transport.group_messages import GroupUse


def left_prefix(n: int) -> str:
    """Return the prefix of the slots that a rank had when it left, and with which it comes back
    before phase n+1."""
    return f"left:{n}:"


def parted_slots(slots: Mapping[str, bytes], n: int) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return the slots that a rank had when it left ({} if it was not absent), and those of the
    place that it takes before phase n+1."""
    prefix = left_prefix(n)
    own = {key.removeprefix(prefix): value for key, value in slots.items() if prefix in key}
    return own, {key: value for key, value in slots.items() if prefix not in key}


def forget_groups(state: ControllerState) -> None:
    """Forget the groups of ranks, all of which start again."""
    state.units.uses = {}


def note_groups(turn: ControllerTurn, worker: WorkerRecord, use: GroupUse) -> None:
    """Note the groups that a rank's phases have used, beside those of its earlier workers."""
    uses = turn.state.units.uses
    known = uses.get(worker.seat, GroupUse())
    if (joined := known.joined(use)) != known:
        uses[worker.seat] = joined
        turn.journal(GroupsNoted(seat=worker.seat, use=joined))


def leaving_units(
    state: ControllerState, survivors: Sequence[WorkerRecord], lost: Sequence[int]
) -> tuple[Units, str]:
    """Return the units of the lost ranks, which may leave, and why they may not ("" if they may):
    the ranks of a unit leave together."""
    if not state.recovery.shrinks:
        return (), "the policy has no rung shrink"
    if not survivors:
        return (), "no rank is left"
    if not max(state.progress.reached[0], state.progress.n):
        return (), "no rank leaves before the first phase is complete"
    answers = [worker.status for worker in survivors if worker.status]
    if needs := sorted({one.needs for one in answers if one.needs}):
        return (), f"the script needs all ranks: {'; '.join(needs)}"
    record = state.units
    units, why = find_units(state.world, state.shared.holdings, record.uses)
    if not why and record.units not in ((), units.units):
        why = "the script needs other ranks together than when ranks last left"
    broken = units.closure(lost)
    missing = {*state.progress.absent, *lost}
    if not why and all(missing.intersection(unit) for unit in units.units):
        why = "a rank of each replica is lost"
    uses = [record.uses[one.seat] for one in survivors if one.seat in record.uses]
    why = why or why_rooted(units, uses, {rank for unit in broken for rank in unit})
    calls = sorted({one.calls for one in answers if one.calls})
    if why and calls:
        return (), f"the script needs all ranks: its phases call {', '.join(calls)} ({why})"
    if not why and (tables := _tables(answers)):
        why = (
            f"a sum cannot be scaled of which each element comes from one rank ({tables[0]}); use a"
            " broadcast, or MAX"
        )
    return (() if why else broken), why


def _tables(answers: Sequence[messages.Status]) -> list[str]:
    """Return the lines of the script whose sums are none, as far as all survivors can see."""
    found = dict.fromkeys(sorted(line for one in answers for line in one.tables), True)
    for line in found:
        found[line] = all(one.tables.get(line, True) for one in answers)
    return [line for line, is_table in found.items() if is_table]


def give_up_healthy(turn: ControllerTurn, leaving: Sequence[int], place: tuple[int, int]) -> bool:
    """Give up the healthy ranks of units that leave, so that their hosts have room for spares;
    return whether there are some. What they have completed stays so: `place`."""
    state = turn.state
    if leaving:
        units, _ = find_units(state.world, state.shared.holdings, state.units.uses)
        state.units.units = units.units if units.size > 1 else ()
    found = [one for seat in leaving if (one := state.occupant(seat)) is not None]
    for worker in found:
        unit = units_of(state.world, state.units.units).closure([worker.seat])[0]
        detail = f"rank {worker.seat} is healthy, and leaves with its unit, ranks {_shown(unit)}"
        state.units.parted = (*state.units.parted, worker.seat)
        incident_response.give_up(turn, worker, turn.blame(worker, "requested", detail), "unit")
    if found:
        state.units.reached = max(state.units.reached, place)
    return bool(found)


def begin_generation(state: ControllerState, absent: Collection[int]) -> None:
    """Set the ranks that are absent from the next generation."""
    state.progress.let_go(absent)
    state.units.parted, state.units.reached = (), (0, 0)


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def template(
    state: ControllerState, survivors: Sequence[WorkerRecord], seat: int, n: int
) -> dict[str, bytes]:
    """Return the slots before phase n+1 of a rank that is present, as far as one has sent them: of
    a rank in the same place of its unit as `seat`."""
    units = units_of(state.world, state.units.units)
    place = units.place_of(seat).place
    keys = (f"before:{n}", f"after:{n}", f"result:{n}")
    for worker in sorted(survivors, key=lambda one: one.seat):
        slots = worker.status.slots if worker.status else {}
        if units.place_of(worker.seat).place == place and any(key in slots for key in keys[:2]):
            return {key: slots[key] for key in keys if key in slots}
    return {}


def absent_units(state: ControllerState) -> Units:
    """Return the units that are absent."""
    return units_of(state.world, state.units.units).closure(state.progress.absent)


def returning(state: ControllerState, survivors: Sequence[WorkerRecord], n: int) -> tuple[int, ...]:
    """Return the absent ranks that come back in the next generation: warm spares that lost ranks
    do not need can take them, and whole units."""
    absent = state.progress.absent
    if not absent:
        return ()
    units = absent_units(state)
    if not all(template(state, survivors, seat, n) for seat in units[0]):
        return ()
    lost = [seat for seat in range(state.world) if state.occupant(seat) is None]
    needed = [seat for seat in lost if seat not in absent]
    for count in range(len(units), 0, -1):
        back = sorted(seat for unit in units[:count] for seat in unit)
        seats = (*needed, *back)
        if len(planned_migration.fitting_spares(state, seats)) == len(seats):
            return tuple(back)
    return ()


def leaving_slots(slots: dict[str, bytes], n: int) -> dict[str, bytes]:
    """Return the slots that are kept of a rank that leaves before phase n+1: those with which it
    has just come back, else its own of this place. Older ones would repeat random numbers."""
    back = {key: slot for key, slot in slots.items() if key.startswith(left_prefix(n))}
    kinds = ("before", "after")
    places = ((key, key.partition(":")) for key in slots if not key.startswith("left:"))
    return back or {
        key: slots[key] for key, (kind, _, at) in places if kind in kinds and int(at) >= n
    }


def returning_slots(
    known: dict[str, bytes], slots: dict[str, bytes], n: int, seed: int
) -> dict[str, bytes]:
    """Return the slots for a rank that comes back before phase n+1: those of another rank, and its
    own newest ones of when it left, under other names. Without any, its generators are seeded with
    `seed`: equally in its unit, whose ranks may have to draw the same numbers."""
    own = {f"{left_prefix(n)}{key}": value for key, value in _own_slots(known, seed).items()}
    return {**slots, **own}


def _own_slots(known: dict[str, bytes], seed: int) -> dict[str, bytes]:
    """Return the newest slots of when a rank left, by their own names; without any, the seed."""
    before = {key: value for key, value in known.items() if key.startswith("left:")}
    own = {key.split(":", 2)[2]: value for key, value in before.items()} or dict(known)
    return own or {"": b"%d" % seed}


def slots_of_absent(state: ControllerState) -> dict[int, dict[str, bytes]]:
    """Return by absent rank what it would come back with of its own, for its deputy."""
    slots, found = state.members.abandoned_slots, dict[int, dict[str, bytes]]()
    for unit in absent_units(state):
        for seat, known in _common_slots(unit, slots).items():
            found[seat] = _own_slots(known, unit[0])
    return found


def return_units(
    state: ControllerState,
    survivors: Sequence[WorkerRecord],
    back: Collection[int],
    slots: dict[int, dict[str, bytes]],
    n: int,
) -> None:
    """Give ranks that come back before phase n+1 their slots. The ranks of a unit begin with those
    that all of them have left: ranks that draw the same numbers go on at the same place."""
    for unit in units_of(state.world, state.units.units).closure(back):
        for seat, known in _common_slots(unit, slots).items():
            place = template(state, survivors, seat, n)
            slots[seat] = returning_slots(known, place, n, unit[0])


def _common_slots(
    unit: Sequence[int], slots: Mapping[int, dict[str, bytes]]
) -> dict[int, dict[str, bytes]]:
    """Return by rank of a unit those of its slots that all ranks of the unit have left."""
    common = set[str].intersection(*(_own_keys(slots.get(seat, {})) for seat in unit))
    keys = sorted(common, reverse=True)
    return {seat: {key: slots[seat][key] for key in keys} for seat in unit}


def _own_keys(slots: Mapping[str, bytes]) -> set[str]:
    """Return the keys of slots with generators; the later one of a phase is the larger."""
    return {key for key in slots if ":before:" in f":{key}" or ":after:" in f":{key}"}


def take_back_when_possible(turn: ControllerTurn) -> None:
    """Ask a rank to stop at a boundary, where absent ranks come back."""
    state = turn.state
    progress = state.progress
    if not progress.absent or progress.asked_back == state.generation or state.ending.drain_ns:
        return
    units = absent_units(state)
    ready = any(len(planned_migration.fitting_spares(state, each)) == len(each) for each in units)
    if not ready or _is_spare_preparing(state) or not planned_migration.is_calm(state):
        return
    first = min(state.generation_members(), key=lambda one: one.seat, default=None)
    if first is not None and not any(one.finished for one in state.generation_members()):
        progress.ask_back()
        turn.send(first, messages.Leave(generation=state.generation))


def _is_spare_preparing(state: ControllerState) -> bool:
    """Return whether a spare is about to be hot: then its move costs the others less."""
    return not state.members.stays_warm and any(
        worker.hello is not None and worker.hello.hot and not worker.is_hot
        for worker in state.members.usable_spares()
    )


def begin_return(turn: ControllerTurn, body: messages.Status) -> None:
    """Close the generation at a boundary, so that absent ranks come back."""
    state = turn.state
    is_asked = state.progress.asked_back == state.generation and body.fault is None
    if state.mode != "open" or not is_asked or body.state != "idle":
        return
    fault = events.Fault(
        kind="regrow",
        detail=f"{len(state.warm_spares())} warm spare(s)",
        seat=state.progress.absent[0],
        t_ns=turn.now_ns,
    )
    incident_response.record_fault(turn, fault, "room")
