"""Places of ranks in a run: their order, and their names in faults.

The number of collectives of an attempt says how far a rank is, if the other rank makes the same
ones. Stages of a pipeline do not:

| two ranks | are compared by |
|---|---|
| of the same stages, or without a pipeline | phase, part of the phase, collectives |
| of different stages of a pipeline | phase, part of the phase |
"""

from __future__ import annotations

from collections.abc import Sequence

from outlast.transport.worker_page import VOTE, WorkerObservation

_PARTS: dict[str, int] = {
    "running": 1,
    "checkpoint": 1,
    "dry": 1,
    "sharing": 2,
    "voting": 2,
    "applying": 3,
}


def order_of(worker: WorkerObservation) -> tuple[int, int]:
    """Return phase and part of the phase, comparable between all ranks."""
    return worker.n, _PARTS.get(worker.state, 0)


def place_of(worker: WorkerObservation) -> tuple[int, int, int]:
    """Return the place of a rank, comparable between ranks of the same stages. Between phases,
    collectives of the last phase do not count."""
    return *order_of(worker), 0 if worker.state == "idle" else worker.collectives


def is_before(worker: WorkerObservation, other: WorkerObservation) -> bool:
    """Return whether `other` is known to be farther than `worker`."""
    if worker.stages == other.stages:
        return place_of(worker) < place_of(other)
    return order_of(worker) < order_of(other)


def ranks_behind(workers: Sequence[WorkerObservation]) -> list[WorkerObservation]:
    """Return the ranks that no rank is known to be behind, and that others are ahead of; all ranks
    if none is known to be ahead of another."""
    orders = [order_of(each) for each in workers]
    first, farthest = min(orders), max(orders)
    places: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for each in workers:
        places.setdefault(each.stages, []).append(place_of(each))
    low, high = ({of: pick(its) for of, its in places.items()} for pick in (min, max))
    last = [
        each for each in workers if place_of(each) == low[each.stages] and order_of(each) == first
    ]
    return [
        each for each in last if place_of(each) < high[each.stages] or order_of(each) < farthest
    ] or last


def are_known_behind(
    behind: Sequence[WorkerObservation], workers: Sequence[WorkerObservation]
) -> bool:
    """Return whether these ranks have the same stages, and a replica of them is farther."""
    stages = {each.stages for each in behind}
    return len(stages) == 1 and any(
        other.stages in stages and is_before(behind[0], other) for other in workers
    )


def name_of(worker: WorkerObservation) -> str:
    """Return the name of a rank, or of a spare."""
    return f"rank {worker.seat}" if worker.seat >= 0 else f"spare {worker.worker}"


def where_of(worker: WorkerObservation) -> str:
    """Return text for the place of a rank."""
    if worker.state == "idle":
        return f"the script's own code before phase {worker.n + 1}"
    if worker.state in VOTE:
        return f"the vote of phase {worker.n + 1}"
    if worker.state in ("starting", "setup"):
        return f"state {worker.state} before phase {worker.n + 1}"
    return f"phase {worker.n + 1}, {worker.state}, at collective {worker.collectives}"
