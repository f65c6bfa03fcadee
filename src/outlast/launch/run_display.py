"""Display of a running job, and the record of its lines."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Protocol

from outlast import events
from outlast.telemetry.event_store import EventWriter
from outlast.telemetry.run_board import Beats

BACKLOG_MAX = 10_000  # events, beats and lines that wait for a terminal
CLOSE_S = 5.0  # for the terminal to show what waits when the run has ended


class Display(Protocol):
    """Shows a run. Never blocks for long, never raises for a closed terminal."""

    def event(self, event: events.AnyEvent) -> None:
        """Something happened."""
        ...

    def beats(self, beats: Beats) -> None:
        """Show the places of the workers: worker -> (n, step, state, loss)."""
        ...

    def line(self, rank: int, text: str) -> None:
        """A line that a rank wrote."""
        ...

    def close(self) -> None:
        """End the display."""
        ...


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
            sys.stderr.write(f"outlast: the view failed, the run goes on\n{traceback.format_exc()}")
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
