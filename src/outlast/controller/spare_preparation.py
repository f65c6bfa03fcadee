"""Preparation of hot spares: which spares run their script before they have a seat, and when.

A spare whose script promises to keep no rank (`outlast.init(hot_spares=True)`) is prepared once the
job has completed a phase. Its set-up collectives are answered from the record of the ranks, which
must therefore be the same for all of them.
"""

from __future__ import annotations

from outlast import events
from outlast.controller.controller_state import ControllerTurn, WorkerRecord
from outlast.transport import messages


def prepare_spares(turn: ControllerTurn) -> None:
    """Send Prepare to the warm spares of an open generation that may be hot."""
    state = turn.state
    members = state.members
    if state.mode != "open" or state.ending.drain_ns or state.is_new() or members.stays_warm:
        return
    waiting = [
        worker
        for worker in state.warm_spares()
        if worker.hello is not None and worker.hello.hot and not worker.preparing
    ]
    records = state.shared.records
    recorded = [each.calls for each in members.workers.values() if each.calls]
    # Replacement workers record nothing; before the rehearsals records still grow.
    is_complete = len(records) == state.world and recorded
    if not waiting or not is_complete or (state.generation == 1 and len(recorded) < state.world):
        return
    if len(set(records.values())) > 1:
        members.keep_warm()
        turn.note(
            "spares stay warm, although the script promises hot_spares: the set-up collectives of"
            " the ranks had different results, so that no rank's record is right for all"
        )
        return
    for worker in waiting:
        turn.change(worker.name, preparing=True)
        frame = messages.Prepare(world=state.world, record=records[0], calls=recorded[0])
        turn.send(worker, frame)


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
