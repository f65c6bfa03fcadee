"""Workers' log files on the console, as they grow, without drowning it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from outlast.launch.host.worker_pool import WorkerHandle, WorkerPool
from outlast.launch.run_display import Display

PERIOD_S = 0.1
BURST_BYTES = 256 << 10  # of one file a look; what is above stays in the file
LINE_BYTES_MAX = 16 << 10
_STREAMS = {1: "stdout.log", 2: "stderr.log"}


class Follower:
    """Reads one log file from its start, whole lines only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at_bytes = 0
        self._rest = b""

    def lines(self, *, last: bool = False) -> list[str]:
        """New lines; `last`: also the one that was never ended."""
        try:
            with self._path.open("rb") as file:
                size_bytes = file.seek(0, 2)
                skipped_bytes = max(0, size_bytes - self._at_bytes - BURST_BYTES)
                file.seek(self._at_bytes + skipped_bytes)
                data = file.read(BURST_BYTES)
        except OSError:
            return []  # a log that cannot be read now is tried again at the next look
        self._at_bytes += skipped_bytes + len(data)
        found = []
        if skipped_bytes:
            found.append(f"... {skipped_bytes} bytes not shown here, see {self._path}")
            self._rest, data = b"", data.partition(b"\n")[2]
        *whole, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (last or len(self._rest) > LINE_BYTES_MAX):
            whole.append(self._rest)
            self._rest = b""
        found += [line[:LINE_BYTES_MAX].decode(errors="replace") for line in whole]
        return found


class Console:
    """Follows the logs of everybody who sits in a seat that is shown; a spare's from its start
    on, once it has one."""

    def __init__(self, crew: WorkerPool, display: Display) -> None:
        self._crew = crew
        self._display = display
        self._unseated: list[WorkerHandle] = []
        self._followed: list[tuple[WorkerHandle, list[Follower]]] = []

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(PERIOD_S)

    def look(self) -> None:
        """Show what is new."""
        self._meet()
        still = []
        for worker, files in self._followed:
            # Asked before the files are read: what it wrote before it was buried is then in them.
            ended = worker.name not in self._crew.workers
            for follower in files:
                for line in follower.lines(last=ended):
                    self._display.line(worker.seat, line)
            if not ended:
                still.append((worker, files))
        self._followed = still

    def _meet(self) -> None:
        while self._crew.started:
            self._unseated.append(self._crew.started.popleft())
        for worker in self._unseated:
            if worker.seat >= 0:
                shown = self._crew.plan.streams.get(worker.seat, 0)
                log_dir = worker.process.log_dir
                names = [name for stream, name in _STREAMS.items() if shown & stream]
                self._followed.append((worker, [Follower(log_dir / name) for name in names]))
        self._unseated = [
            worker
            for worker in self._unseated
            if worker.seat < 0 and worker.name in self._crew.workers
        ]
