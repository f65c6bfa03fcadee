"""What a person sees while the run lives, and the record that is kept of the same."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from outlast import events
from outlast.observe.store import EventWriter

Beats = dict[str, tuple[int, int, str, float]]
PROGRESS_S = 10.0


class Display(Protocol):
    """Shows a run. Never blocks for long, never raises for a closed terminal."""

    def event(self, event: events.AnyEvent) -> None:
        """Something happened."""
        ...

    def beats(self, beats: Beats) -> None:
        """Where the workers are: worker -> (n, step, state, loss)."""
        ...

    def line(self, rank: int, text: str) -> None:
        """A line that a rank wrote."""
        ...

    def close(self) -> None: ...


class Plain:
    """Lines only: workers' output to `lines`, progress to `progress`."""

    def __init__(self, lines: TextIO = sys.stdout, progress: TextIO = sys.stderr) -> None:
        self._lines = lines
        self._progress = progress
        self._step = -1
        self._said_s = time.monotonic()

    def event(self, event: events.AnyEvent) -> None:
        text = _TELL.get(type(event), lambda _event: "")(event)
        if text:
            self._say(text)

    def beats(self, beats: Beats) -> None:
        now_s = time.monotonic()
        if not beats or now_s - self._said_s < PROGRESS_S:
            return
        _, step, state, loss = max(beats.values(), key=lambda beat: beat[:2])
        if step != self._step and step > 0:
            self._step, self._said_s = step, now_s
            shown = f"  loss {loss:.4f}" if loss == loss and loss else ""
            self._say(f"step {step}{shown}  ({state})")

    def line(self, rank: int, text: str) -> None:
        _write(self._lines, f"[{rank}]: {text}\n")

    def close(self) -> None:
        pass

    def _say(self, text: str) -> None:
        _write(self._progress, f"outlast: {text}\n")


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):  # ValueError: the stream is closed
        pass  # a terminal that went away must not end the run; the log files have it all


def _started(event: events.RunStarted) -> str:
    spares = f" and {event.spares} spare(s)" if event.spares else ""
    again = f", resumed at step {event.resumed_step}" if event.resumed_step >= 0 else ""
    return f"run {event.run}, term {event.term}: {event.world} rank(s){spares}{again}"


def _noticed(event: events.Noticed) -> str:
    fault = event.fault
    who = f"rank {fault.seat}" if fault.seat >= 0 else (fault.worker or "somebody")
    return f"incident {event.incident}: {who} {fault.kind} ({fault.detail}), noticed by {event.how}"


def _decided(event: events.Decided) -> str:
    what = f"{event.rung} ({event.verdict}) at step {event.step}"
    return f"incident {event.incident}: {what}: {event.reason}"


def _opened(event: events.GenerationOpened) -> str:
    if event.incident:
        return f"incident {event.incident}: over, generation {event.generation} is open"
    return f"generation {event.generation} is open"


_TELL: dict[type, Callable[..., str]] = {
    events.RunStarted: _started,
    events.Noticed: _noticed,
    events.Decided: _decided,
    events.GenerationOpened: _opened,
    events.CheckpointSaved: lambda event: f"checkpoint of step {event.step}: {event.path}",
    events.CheckpointFailed: lambda event: f"checkpoint of step {event.step} failed: {event.error}",
    events.Note: lambda event: event.text,
}


class Record:
    """Every event of the launcher goes to the store first, then to the person."""

    def __init__(self, writer: EventWriter, display: Display) -> None:
        self._writer = writer
        self.display = display

    def now_ns(self) -> int:
        return self._writer.now_ns()

    def emit(self, event: events.AnyEvent) -> None:
        self._writer.emit(event)
        self.display.event(event)

    def note(self, text: str) -> None:
        """Something that the owner should know."""
        self.emit(events.Note(t_ns=self.now_ns(), worker="", seat=-1, text=text))

    def close(self) -> None:
        self._writer.close()
        self.display.close()
