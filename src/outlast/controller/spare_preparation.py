"""Preparation of hot spares: which spares run their script before they have a seat, and when.

A spare whose script promises to keep no rank (`outlast.init(hot_spares=True)`) is prepared once the
job has completed a phase. Its set-up collectives are answered from the record of the ranks that it
may take, which must therefore be the same for all of them.

Device meshes are built for one rank, the *stand-in*, and can be moved to its replicas. Each spare
gets a stand-in of the replica set for which the fewest other spares are prepared. A rank without a
replica is no stand-in: the spare would fit one rank only, and waits where a mesh is made instead.
"""

from __future__ import annotations

from collections import Counter

from outlast import events
from outlast.controller import node_placement
from outlast.controller.controller_state import ControllerState, ControllerTurn, WorkerRecord
from outlast.transport import messages


def prepare_spares(turn: ControllerTurn) -> None:
    """Send Prepare to the warm spares of an open generation that may be hot."""
    state = turn.state
    members = state.members
    if state.mode != "open" or state.ending.drain_ns or state.is_new() or members.stays_warm:
        return
    if not any(_is_waiting(worker) for worker in members.usable_spares()):
        return
    waiting = [worker for worker in state.warm_spares() if _is_waiting(worker)]
    if not waiting or not _is_recorded(state):
        return
    records = state.shared.records
    for worker in waiting:
        stand_in = _choose_stand_in(state)
        if stand_in < 0 and len(set(records.values())) > 1:
            members.keep_warm()
            turn.note(
                "spares stay warm, although the script promises hot_spares: the set-up collectives"
                " of the ranks had different results, so that no rank's record is right for all"
            )
            return
        turn.change(worker.name, preparing=True, stand_in=stand_in)
        frame = messages.Prepare(
            world=state.world,
            record=records[max(stand_in, 0)],
            calls=state.shared.calls,
            stand_in=stand_in,
        )
        turn.send(worker, frame)


def why_unprepared(state: ControllerState, worker: WorkerRecord) -> str:
    """Return why a spare builds its model only when it has a seat; "" if it does so in advance."""
    if worker.hello is None or not worker.hello.hot:
        return "the script does not promise hot_spares"
    if worker.preparing:
        return ""
    if state.members.stays_warm:
        return "spares stay warm"
    return "" if _is_recorded(state) else "the set-up of some ranks was not recorded"


def _is_recorded(state: ControllerState) -> bool:
    """Return whether spares can be prepared by what the ranks have recorded. Replacement workers
    record nothing; before the rehearsals records still grow."""
    if len(state.shared.records) < state.world or not state.shared.calls:
        return False
    recorded = sum(bool(each.calls) for each in state.members.workers.values())
    return state.generation > 1 or recorded >= state.world


def _is_waiting(worker: WorkerRecord) -> bool:
    """Return whether a spare could be hot and has not been asked to prepare."""
    return worker.hello is not None and worker.hello.hot and not worker.preparing


def _choose_stand_in(state: ControllerState) -> int:
    """Return the lowest rank of the replica set with the fewest prepared spares; -1 if no set has
    several ranks with one record."""
    records, holdings = state.shared.records, state.shared.holdings
    sets: dict[bytes | None, list[int]] = {}
    for seat in range(state.world):
        sets.setdefault(holdings.get(seat), []).append(seat)
    taken = Counter(
        holdings.get(worker.stand_in)
        for worker in state.members.workers.values()
        if worker.seat < 0 and worker.stand_in >= 0 and not worker.killed_ns
    )
    usable = [
        (taken[shards], seats[0])
        for shards, seats in sets.items()
        if len(seats) > 1 and len({records.get(seat) for seat in seats}) == 1
    ]
    return min(usable)[1] if usable else -1


def may_take(state: ControllerState, worker: WorkerRecord, seat: int) -> bool:
    """Return whether a warm spare, which may have been asked to prepare, can take this seat."""
    if not node_placement.has_gpu_for(state, worker.agent, seat):
        return False
    if not worker.preparing:
        return True
    records, stand_in = state.shared.records, max(worker.stand_in, 0)
    if records.get(seat) != records.get(stand_in):
        return False
    if worker.is_hot:
        return not worker.fits or seat in worker.fits
    holdings = state.shared.holdings
    return worker.stand_in < 0 or holdings.get(seat) == holdings.get(stand_in)


def worker_lost(turn: ControllerTurn, worker: WorkerRecord, fault: events.Fault) -> None:
    """Prepare no further spares if one ended while it was prepared, also by a signal: a script that
    crashes or runs out of memory without a rank would do so again."""
    is_over, kind = turn.state.mode in ("stopping", "ended"), (worker.fault or fault).kind
    says_nothing = kind == "agent_lost" or kind in events.REQUESTS
    if is_over or not worker.preparing or worker.is_hot or says_nothing:
        return
    if worker.seat < 0 and not turn.state.members.stays_warm:
        turn.state.members.keep_warm()
        turn.note(
            f"spare {worker.name} ended while it was prepared without a rank; later spares stay"
            f" warm: see logs/spare/{worker.name}",
            worker.name,
        )
