"""What an agent sees of a simulated worker: its page, and what the kernel says."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from outlast.controller.worker_observation import WorkerObservation
from outlast.transport.worker_page import WARM_PHASES, PhasePace, State

if TYPE_CHECKING:
    from outlast.testing.rank import SimWorker

_PHASE_NS = 100_000_000  # about what it takes


def look_at(worker: SimWorker) -> WorkerObservation:
    """As the watch sees it now."""
    word: State = "healing"
    if worker.state in ("starting", "waiting", "setup", "running", "voting", "applying"):
        word = cast("State", worker.state)
    elif worker.state in ("finished", "torn"):
        word = "finished" if worker.state == "finished" else "applying"
    elif worker.stalled or worker.opened == worker.generation > max(worker.closed, worker.answered):
        word = "idle"
    return WorkerObservation(
        worker=worker.name,
        seat=worker.seat,
        n=worker.n,
        state=word,
        collectives=0,
        t_ns=worker.moved_ns,
        paces={0: PhasePace(worker.completed, _PHASE_NS if worker.completed > WARM_PHASES else 0)},
        waits=word == "voting",
        letter="T" if worker.hung else "S",
    )
