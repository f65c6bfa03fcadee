"""Workers of ranks, and hosts of workers, by the events of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from outlast.errors import RunDirError, UsageError
from outlast.events import (
    AnyEvent,
    NodeReleased,
    RunEnded,
    RunStarted,
    WorkerLost,
    WorkerSeated,
    WorkerSpawned,
    WorkerWarm,
)


class RankHosts:
    """Present workers of a run. Clocks of hosts may differ, so that only the order of events of one
    worker counts."""

    def __init__(self, before: Iterable[AnyEvent] = ()) -> None:
        self.is_running = self.has_begun = False
        self.hosts: dict[str, str] = {}  # of all workers that were ever started
        self.ranks: dict[int, str] = {}
        self.releases = Counter[str]()  # by host: how often it has left the run
        self._warm: set[str] = set()
        self._lost: set[str] = set()
        for event in before:
            self.take(event)

    def take(self, event: AnyEvent) -> None:
        """Take an event into account."""
        match event:
            case RunStarted():
                self.is_running = self.has_begun = True
                self.hosts, self.ranks = {}, {}
            case RunEnded():
                self.is_running = False
            case WorkerSpawned():
                self.hosts[event.worker] = event.host
            case WorkerWarm():
                self._warm.add(event.worker)
            case WorkerSeated():
                self.ranks[event.seat] = event.worker
            case WorkerLost():
                self._lost.add(event.worker)
                if self.ranks.get(event.seat) == event.worker:
                    del self.ranks[event.seat]
            case NodeReleased():
                self.releases[event.host] += 1
            case _:
                pass

    def must_run(self, run_dir: Path) -> None:
        """Raise RunDirError unless a run is running."""
        if not self.is_running:
            why = "the run has ended"
            if not self.has_begun:
                why = "no controller has written events here; use the host that has the controller"
            raise RunDirError(f"{run_dir}: {why}; nothing was requested")

    def worker_of(self, rank: int) -> str:
        """Return the worker of a rank. Raises UsageError."""
        worker = self.ranks.get(rank, "")
        if worker not in self.hosts:
            known = ", ".join(map(str, sorted(self.ranks))) or "none"
            raise UsageError(
                f"--rank {rank}: no worker has this rank now (ranks with a worker: {known});"
                " nothing was requested"
            )
        return worker

    def check_host(self, host: str, flag: str = "--host") -> str:
        """Return the host if it has or had workers. Raises UsageError."""
        known = sorted(set(self.hosts.values()))
        found = [one for one in known if host in (one, one.partition(".")[0])]
        if len(found) != 1:
            raise UsageError(
                f"{flag} {host}: not a host of this run (hosts: {', '.join(known) or 'none'});"
                " nothing was requested"
            )
        return found[0]

    def workers_on(self, host: str) -> set[str]:
        """Return the workers of the ranks on a host."""
        return {name for name in self.ranks.values() if self.hosts.get(name) == host}

    def alive(self) -> dict[str, str]:
        """Return the workers that live, with their hosts."""
        return {name: host for name, host in self.hosts.items() if name not in self._lost}

    def warm(self) -> dict[str, str]:
        """Return the workers that live and have reached `outlast.init()`, with their hosts."""
        return {name: host for name, host in self.alive().items() if name in self._warm}

    def spares_beside(self, host: str) -> tuple[int, int]:
        """Return how many spares on other hosts are warm, and how many start."""
        seated = set(self.ranks.values())
        found = {name for name, at in self.alive().items() if at != host and name not in seated}
        warm = len(found & self._warm)
        return warm, len(found) - warm
