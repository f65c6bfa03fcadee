"""Shards by rank: which ranks hold the same part of the protected state.

Each worker reports a digest of the shards that it holds (StateProtected). Ranks with the same
digest are each other's replicas: one of them can be the donor of another. Under DDP all ranks have
the same digest, under HSDP those of one place in the shard dimension, under 1-D FSDP none two.
"""

from __future__ import annotations

from collections.abc import Collection

from outlast.controller.controller_state import ControllerState, ControllerTurn, WorkerRecord
from outlast.controller.lifecycle import run_ending
from outlast.controller.recovery import incident_response


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
    return tuple(
        seat
        for seat in range(state.world)
        if seat not in whole and seat in state.shared.holdings and not donors_of(state, seat, whole)
    )


def transfers(turn: ControllerTurn, whole: Collection[int]) -> tuple[tuple[int, int], ...] | None:
    """Return (donor, joiner) for every rank that is not whole, spread over the donors.

    Give up a joiner without a donor, whose generation is then closed, and return None.
    """
    state = turn.state
    joiners = [seat for seat in range(state.world) if seat not in whole]
    moves: list[tuple[int, int]] = []
    taken: dict[int, int] = {}
    for seat in joiners:
        donors = donors_of(state, seat, whole)
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
