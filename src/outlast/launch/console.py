"""Workers' log files on the console, as they grow, without drowning it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from outlast.launch.crew import Crew
from outlast.launch.display import Display

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
    """Follows the logs of everybody who sits in a seat that is shown."""

    def __init__(self, crew: Crew, display: Display) -> None:
        self._crew = crew
        self._display = display
        self._followers: dict[str, tuple[int, list[Follower]]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(PERIOD_S)

    def look(self) -> None:
        for worker in self._crew.workers.values():
            if worker.name not in self._followers and worker.seat >= 0:
                shown = self._crew.plan.streams.get(worker.seat, 0)
                files = [
                    Follower(worker.process.log_dir / name)
                    for stream, name in _STREAMS.items()
                    if shown & stream
                ]
                self._followers[worker.name] = worker.seat, files
        for name in list(self._followers):
            # Looked at before the files: what a worker wrote before it was buried is then in them.
            gone = name not in self._crew.workers
            seat, files = self._followers[name]
            for follower in files:
                for line in follower.lines(last=gone):
                    self._display.line(seat, line)
            if gone:
                self._followers[name] = seat, []

    def close(self) -> None:
        """Show what is left."""
        self.look()
