"""Display of a running job: events, worker positions and log lines."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from outlast import events
from outlast.controller.inputs import EndRun
from outlast.launch.host.worker_pool import WorkerHandle, WorkerPool
from outlast.launch.run_directory import RunDir
from outlast.launch.torchrun.worker_streams import line_prefix
from outlast.launch.torchrun_arguments import RunPlan
from outlast.telemetry.event_store import EventWriter
from outlast.telemetry.run_board import Beats
from outlast.transport.messages import Checkpointed

BACKLOG_MAX = 10_000  # queued events, beats and lines
CLOSE_S = 5.0  # timeout to show the queue at the end of the run


class Display(Protocol):
    """Display of a run. Must not block for long or raise for a closed terminal."""

    def event(self, event: events.AnyEvent) -> None:
        """Show an event."""

    def beats(self, beats: Beats) -> None:
        """Show the positions of the workers: worker -> (n, step, state, loss)."""

    def line(self, text: str, *, is_error: bool) -> None:
        """Show a line of a worker's stdout or, with `is_error`, stderr."""

    def close(self) -> None:
        """End the display."""


class DetachedDisplay:
    """Display on its own thread, so that a blocked terminal (Ctrl-S, `| less`) cannot block the
    run. Items beyond `backlog_max` queued ones are dropped and counted; event and log files are
    complete."""

    def __init__(self, inner: Display, *, backlog_max: int = BACKLOG_MAX) -> None:
        self._inner = inner
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(backlog_max)
        self._dropped = 0
        self._thread = threading.Thread(target=self._show, name="display", daemon=True)
        self._thread.start()

    def event(self, event: events.AnyEvent) -> None:
        """Queue an event for the display's thread."""
        self._put(lambda: self._inner.event(event))

    def beats(self, beats: Beats) -> None:
        """Queue the positions of the workers for the display's thread."""
        self._put(lambda: self._inner.beats(beats))

    def line(self, text: str, *, is_error: bool) -> None:
        """Queue a line of a worker's output for the display's thread."""
        self._put(lambda: self._inner.line(text, is_error=is_error))

    def close(self, within_s: float = CLOSE_S) -> None:
        """Show the queue and close the display; abandon it if blocked for `within_s`."""
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
        except Exception:  # noqa: BLE001 - a display error must not end the run
            sys.stderr.write(f"outlast: view failed, the run continues\n{traceback.format_exc()}")
            with contextlib.suppress(Exception):  # try to restore the terminal
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
    """Sink of the launcher's events: the event store first, then the display."""

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
        """Emit a note for the run's owner."""
        self.emit(events.Note(t_ns=self.now_ns(), worker="", seat=-1, text=text))

    def run_started(
        self, plan: RunPlan, run_dir: RunDir, checkpoint: Checkpointed | None, notes: list[str]
    ) -> None:
        """Emit RunStarted, a launcher's first event, and the notes."""
        self.emit(
            events.RunStarted(
                t_ns=self.now_ns(),
                run=run_dir.job.run,
                term=run_dir.job.term,
                world=plan.world,
                spares=plan.spares,
                script=plan.script,
                args=plan.args,
                resumed_n=checkpoint.n if checkpoint else -1,
                resumed_step=checkpoint.step if checkpoint else -1,
                policy=f"{plan.policy.name} {plan.policy.digest}",
            )
        )
        for text in (*notes, *run_dir.notes):
            self.note(text)

    def run_ended(self, end: EndRun) -> None:
        """Emit RunEnded, a launcher's last event."""
        self.emit(
            events.RunEnded(
                t_ns=self.now_ns(),
                outcome=end.outcome,
                exit_code=end.exit_code,
                n=end.n,
                step=end.step,
                cause=end.cause,
            )
        )

    def close(self) -> None:
        """Close the event file and the display."""
        self._writer.close()
        self.display.close()


PERIOD_S = 0.1
BURST_BYTES = 256 << 10  # displayed per file and poll; the log file has the rest
LINE_BYTES_MAX = 16 << 10
_STDERR = 2
_STREAMS = {1: "stdout.log", _STDERR: "stderr.log"}


class Follower:
    """Incremental reader of one log file, in whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at_bytes = 0
        self._rest = b""

    def lines(self, *, last: bool = False) -> list[str]:
        """Return the new lines; `last`: including an unterminated last line."""
        try:
            with self._path.open("rb") as file:
                size_bytes = file.seek(0, 2)
                skipped_bytes = max(0, size_bytes - self._at_bytes - BURST_BYTES)
                file.seek(self._at_bytes + skipped_bytes)
                data = file.read(BURST_BYTES)
        except OSError:
            return []  # retried at the next poll
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


class _ShownStream(NamedTuple):
    """Displayed stream of a worker."""

    follower: Follower
    prefix: str
    is_error: bool


class Console:
    """Follower of the logs of all displayed ranks; a spare's log is shown from its start once it
    has a rank."""

    def __init__(self, crew: WorkerPool, display: Display) -> None:
        self._crew = crew
        self._display = display
        self._unseated: list[WorkerHandle] = []
        self._followed: list[tuple[WorkerHandle, list[_ShownStream]]] = []

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(PERIOD_S)

    def look(self) -> None:
        """Show new lines and events."""
        self._meet()
        still = []
        for worker, streams in self._followed:
            # Checked before reading: all output of a reaped worker is then in the files.
            ended = worker.name not in self._crew.workers
            for stream in streams:
                for line in stream.follower.lines(last=ended):
                    self._display.line(f"{stream.prefix}{line}", is_error=stream.is_error)
            if not ended:
                still.append((worker, streams))
        self._followed = still

    def _meet(self) -> None:
        while self._crew.started:
            self._unseated.append(self._crew.started.popleft())
        for worker in self._unseated:
            if worker.seat >= 0:
                self._followed.append((worker, self._streams(worker)))
        self._unseated = [
            worker
            for worker in self._unseated
            if worker.seat < 0 and worker.name in self._crew.workers
        ]

    def _streams(self, worker: WorkerHandle) -> list[_ShownStream]:
        plan, seat = self._crew.plan, worker.seat
        shown, teed = plan.streams.get(seat, 0), plan.teed.get(seat, 0)
        prefix = line_prefix(plan.line_prefix, plan.role, seat, seat % plan.ranks_per_node)
        return [
            _ShownStream(
                Follower(worker.process.log_dir / name),
                prefix if teed & stream else "",
                stream == _STDERR,
            )
            for stream, name in _STREAMS.items()
            if shown & stream
        ]
