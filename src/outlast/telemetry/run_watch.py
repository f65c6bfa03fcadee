"""Watch over a run whose events are followed: its end, or the death of its launcher."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from outlast.errors import RunDirError
from outlast.events import AnyEvent, RunEnded, RunStarted, WorkerSpawned
from outlast.telemetry import event_store

LOOK_S = 1.0


class RunWatch:
    """Condition to stop following a run: its end, or the death of its launcher.

    Raises RunDirError where the directory has no events.
    """

    def __init__(self, run_dir: Path) -> None:
        if not (run_dir / event_store.DIRECTORY).is_dir():
            raise RunDirError(
                f"{run_dir} is no run directory ({run_dir / event_store.DIRECTORY} is missing);"
                " give the directory that `outlast run` printed at its start"
            )
        self.stop = threading.Event()
        self.died = False
        self._run_dir = run_dir
        self._spawned: list[WorkerSpawned] = []
        self._next_s = 0.0

    def take(self, event: AnyEvent) -> None:
        """Update the condition with an event of the run."""
        if isinstance(event, RunEnded):
            self.stop.set()  # polled once more: another launcher may have resumed the run
            self.died = False
        elif isinstance(event, RunStarted):
            self.stop.clear()
            self.died = False
        elif isinstance(event, WorkerSpawned):
            self._spawned = [event]

    def look(self) -> None:
        """See whether the launcher lives, after a poll without events."""
        now_s = time.monotonic()
        if now_s < self._next_s or self.stop.is_set():
            return
        self._next_s = now_s + LOOK_S
        if event_store.life_of(self._run_dir, self._spawned) == "died":
            self.died = True  # unless the last poll finds its end or a resumption
            self.stop.set()
