"""Deputies: ranks that save the parts of absent ones.

A checkpoint has a part of each rank. That of an absent rank is what it would come back with at this
place: the state that all its replicas hold, the place in the script of a rank that is present, and
its own random generators as it left them.
"""

from __future__ import annotations

from collections import Counter

from outlast.controller.controller_state import ControllerState
from outlast.controller.recovery.rank_units import units_of

DEPUTY_RANKS_MAX = 7  # with two saves of each in flight, its keeper can take the orders


def deputies_of(state: ControllerState) -> dict[int, int]:
    """Return the deputies of absent ranks: ranks in the same places of other units, with the same
    shards, in turn, each for up to DEPUTY_RANKS_MAX. Without one there is no checkpoint."""
    absent, holdings = state.progress.absent, state.shared.holdings
    if not absent:
        return {}
    units = units_of(state.world, state.units.units)
    kinds = [(units.place_of(seat).place, holdings.get(seat)) for seat in range(state.world)]
    here: dict[tuple[int, bytes | None], list[int]] = {}
    for seat in range(state.world):
        if seat not in absent:
            here.setdefault(kinds[seat], []).append(seat)
    found: dict[int, int] = {}
    taken: Counter[tuple[int, bytes | None]] = Counter()
    for seat in absent:
        ranks = here.get(kinds[seat], [])
        turn, index = divmod(taken[kinds[seat]], len(ranks) or 1)
        if ranks and turn < DEPUTY_RANKS_MAX:
            found[seat] = ranks[index]
            taken[kinds[seat]] += 1
    return found


def rank_0(state: ControllerState) -> int:
    """Return the rank that has the part of rank 0 in saves: itself, or its deputy."""
    return deputies_of(state).get(0, 0)
