"""A simulated host as a machine: it may stand still as a whole, and lose power."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from outlast.transport import messages
from outlast.transport.rendezvous_messages import HostMeetings
from outlast.transport.worker_page import WARM_PHASES, PhasePace, State, WorkerObservation

if TYPE_CHECKING:
    from outlast.testing.simulated_cluster import SimCluster
    from outlast.testing.simulated_process import SimProcess
    from outlast.testing.simulated_worker import SimWorker

_PHASE_NS = 100_000_000  # typical duration


def observe_worker(worker: SimWorker) -> WorkerObservation:
    """Return the present observation of a worker, as the hang monitor gets it."""
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


class SimHost:
    """Processes of one host: callbacks wait while it stands still."""

    def __init__(self, cluster: SimCluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.line = cluster.timeline
        self.workers: dict[str, SimWorker] = {}
        self.meetings = HostMeetings()
        self.present = True  # it has power, and its agent runs
        self.lives = 0  # how often it has lost power
        self.frozen: list[Callable[[], None]] | None = None  # what waits while it stands still

    def call(self, what: Callable[[], None]) -> None:
        """Run a callback of a process of this host; later if the host stands still."""
        if self.frozen is not None:
            self.frozen.append(what)
        else:
            what()

    def meet(self, sender: SimProcess, meet: messages.Meet) -> messages.HostMeets | None:
        """Return what this host's ranks have for a group, once all of them have come. A group
        without ranks on other hosts gets its answer here."""
        met = self.meetings.add(sender.seat, meet)
        if not isinstance(met, messages.Met):
            return met
        for one in self.workers.values():
            if one.seat in met.parts:
                answer = partial(one.call, partial(one.hear, met))
                self.line.after(self.line.between(0.0005, 0.01), answer)
        return None

    def call_alive(self, lives: int, what: Callable[[Any], None], value: Any) -> None:
        """Run a callback of a process of this host, unless it has lost power since."""

        def run() -> None:
            if self.present and lives == self.lives:
                what(value)

        self.call(run)

    def freeze(self, seconds: float) -> None:
        """Let the whole host stand still for a time."""
        if self.frozen is not None or not self.present:
            return
        self.frozen = []
        for worker in self.workers.values():
            worker.pause(seconds)
        for controller in self.cluster.controllers.values():
            if controller.host is self:
                controller.stop_for(seconds)
        self.line.after(seconds, self._thaw)

    def _thaw(self) -> None:
        waiting, self.frozen = self.frozen or [], None
        self.cluster.note(f"{self.name} wakes")
        self.line.dice.shuffle(waiting)
        for what in waiting:
            what()
