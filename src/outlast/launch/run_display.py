"""Display of a running job, and the record of its lines."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from outlast import events
from outlast.launch.host.worker_pool import WorkerHandle, WorkerPool
from outlast.telemetry.event_store import EventWriter
from outlast.telemetry.run_board import Beats

BACKLOG_MAX = 10_000  # events, beats and lines that wait for a terminal
CLOSE_S = 5.0  # for the terminal to show what waits when the run has ended


class Display(Protocol):
    """Shows a run. Never blocks for long, never raises for a closed terminal."""

    def event(self, event: events.AnyEvent) -> None:
        """Something happened."""

    def beats(self, beats: Beats) -> None:
        """Show the places of the workers: worker -> (n, step, state, loss)."""

    def line(self, rank: int, text: str) -> None:
        """A line that a rank wrote."""

    def close(self) -> None:
        """End the display."""


class DetachedDisplay:
    """A display on a thread of its own: a terminal that takes nothing (Ctrl-S, `| less`) must not
    hold the run up. What comes while `BACKLOG_MAX` things wait is dropped and counted; events and
    log files have it all."""

    def __init__(self, inner: Display, *, backlog_max: int = BACKLOG_MAX) -> None:
        self._inner = inner
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(backlog_max)
        self._dropped = 0
        self._thread = threading.Thread(target=self._show, name="display", daemon=True)
        self._thread.start()

    def event(self, event: events.AnyEvent) -> None:
        """Hand an event to the inner display's thread."""
        self._put(lambda: self._inner.event(event))

    def beats(self, beats: Beats) -> None:
        """Hand the places of the workers to the inner display's thread."""
        self._put(lambda: self._inner.beats(beats))

    def line(self, rank: int, text: str) -> None:
        """Hand a line of a worker's output to the inner display's thread."""
        self._put(lambda: self._inner.line(rank, text))

    def close(self, within_s: float = CLOSE_S) -> None:
        """Show what waits. A terminal that is blocked for longer is left alone."""
        try:
            self._waiting.put(None, timeout=within_s)
        except queue.Full:
            return
        self._thread.join(within_s)

    def _put(self, show: Callable[[], None]) -> None:
        try:
            self._waiting.put_nowait(show)
        except queue.Full:
            self._dropped += 1

    def _show(self) -> None:
        try:
            while show := self._waiting.get():
                show()
                if self._dropped and self._waiting.empty():
                    self._tell_dropped()
            if self._dropped:
                self._tell_dropped()
            self._inner.close()
        except Exception:  # noqa: BLE001 - a mistake in the view must not end or blind the run
            sys.stderr.write(f"outlast: view failed, the run continues\n{traceback.format_exc()}")
            with contextlib.suppress(Exception):  # it may leave the terminal as it found it
                self._inner.close()
            while self._waiting.get() is not None:
                pass

    def _tell_dropped(self) -> None:
        count, self._dropped = self._dropped, 0
        text = (
            f"{count} lines and events were not shown while the terminal was blocked;"
            " `outlast events` and the log files have them"
        )
        self._inner.event(events.Note(t_ns=0, worker="", seat=-1, text=text))


class DisplayRecord:
    """Every event of the launcher goes to the store first, then to the person."""

    def __init__(self, writer: EventWriter, display: Display) -> None:
        self._writer = writer
        self.display = display

    def now_ns(self) -> int:
        """Return the time on the run's clock in nanoseconds."""
        return self._writer.now_ns()

    def emit(self, event: events.AnyEvent) -> None:
        """Write an event and show it."""
        self._writer.emit(event)
        self.display.event(event)

    def note(self, text: str) -> None:
        """Something that the owner should know."""
        self.emit(events.Note(t_ns=self.now_ns(), worker="", seat=-1, text=text))

    def close(self) -> None:
        """Close the event file and the display."""
        self._writer.close()
        self.display.close()


PERIOD_S = 0.1
BURST_BYTES = 256 << 10  # of one file per poll; the rest is read from the log file only
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
    """Follows the logs of the workers of all displayed ranks; a spare's from its start
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
        """Show new lines and events."""
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
