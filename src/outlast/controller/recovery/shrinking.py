"""Fewer ranks, and more again: ranks without a place leave, and come back between two steps.

A rank leaves where nobody can take it: no spare, no room for a new worker. Then it is absent; the
generations that follow have no worker for it, and its own state is kept as it was. It comes back
when a warm spare can take it: one rank stops at a boundary, and all go on with it in a new
generation. Its worker gets weights from a replica, its place in the script from the slots of a rank
that was present, and its random generators from its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outlast import events
from outlast.controller import planned_migration
from outlast.controller.controller_state import ControllerState, ControllerTurn, WorkerRecord
from outlast.controller.recovery import incident_response
from outlast.transport import messages


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


def why_not(state: ControllerState, survivors: Sequence[WorkerRecord], lost: Sequence[int]) -> str:
    """Return why no rank may leave; "" if they may."""
    if not survivors:
        return "no rank is left"
    if not max(state.progress.reached[0], state.progress.n):
        return "no rank leaves before the first phase is complete"
    holdings = state.shared.holdings
    if len({holdings.get(seat) for seat in range(state.world)}) > 1:
        return "ranks hold shards of their own, so that none may leave alone"
    answers = [worker.status for worker in survivors if worker.status]
    if needs := sorted({one.needs for one in answers if one.needs}):
        return f"the script needs all ranks: {'; '.join(needs)}"
    if roots := sorted({root for one in answers for root in one.roots} & set(lost)):
        return f"rank {roots[0]} is the root of a collective in the script's phases"
    if tables := _tables(answers):
        return (
            f"a sum cannot be scaled of which each element comes from one rank ({tables[0]}); use a"
            " broadcast, or MAX"
        )
    return ""


def _tables(answers: Sequence[messages.Status]) -> list[str]:
    """Return the lines of the script whose sums are none, as far as all survivors can see."""
    found = dict.fromkeys(sorted(line for one in answers for line in one.tables), True)
    for line in found:
        found[line] = all(one.tables.get(line, True) for one in answers)
    return [line for line, is_table in found.items() if is_table]


def template(survivors: Sequence[WorkerRecord], n: int) -> dict[str, bytes]:
    """Return the slots before phase n+1 of a rank that is present, as far as one has sent them."""
    keys = (f"before:{n}", f"after:{n}", f"result:{n}")
    for worker in sorted(survivors, key=lambda one: one.seat):
        slots = worker.status.slots if worker.status else {}
        if any(key in slots for key in keys[:2]):
            return {key: slots[key] for key in keys if key in slots}
    return {}


def returning(state: ControllerState, survivors: Sequence[WorkerRecord], n: int) -> tuple[int, ...]:
    """Return the absent ranks that come back in the next generation: warm spares that lost ranks
    do not need can take them."""
    absent = state.progress.absent
    if not absent or not template(survivors, n):
        return ()
    lost = [seat for seat in range(state.world) if state.occupant(seat) is None]
    needed = [seat for seat in lost if seat not in absent]
    for count in range(len(absent), 0, -1):
        seats = (*needed, *absent[:count])
        if len(planned_migration.fitting_spares(state, seats)) == len(seats):
            return absent[:count]
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


def returning_slots(known: dict[str, bytes], slots: dict[str, bytes], n: int) -> dict[str, bytes]:
    """Return the slots for a rank that comes back before phase n+1: those of another rank, and its
    own newest ones of when it left, under other names."""
    before = {key: value for key, value in known.items() if key.startswith("left:")}
    own = {f"{left_prefix(n)}{key.split(':', 2)[2]}": value for key, value in before.items()}
    own = own or {f"{left_prefix(n)}{key}": value for key, value in known.items()}
    return {**slots, **(own or {left_prefix(n): b""})}


def take_back_when_possible(turn: ControllerTurn) -> None:
    """Ask a rank to stop at a boundary, where absent ranks come back."""
    state = turn.state
    progress = state.progress
    if not progress.absent or progress.asked_back == state.generation or state.ending.drain_ns:
        return
    ready = planned_migration.fitting_spares(state, progress.absent)
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
