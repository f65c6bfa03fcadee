"""A simulated host as a machine: it may stand still as a whole, and lose power."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.testing.simulated_cluster import SimCluster
    from outlast.testing.simulated_worker import SimWorker


class SimHost:
    """Processes of one host: callbacks wait while it stands still."""

    def __init__(self, cluster: SimCluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.line = cluster.timeline
        self.workers: dict[str, SimWorker] = {}
        self.present = True  # it has power, and its agent runs
        self.lives = 0  # how often it has lost power
        self.frozen: list[Callable[[], None]] | None = None  # what waits while it stands still

    def call(self, what: Callable[[], None]) -> None:
        """Run a callback of a process of this host; later if the host stands still."""
        if self.frozen is not None:
            self.frozen.append(what)
        else:
            what()

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
