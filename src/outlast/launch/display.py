"""What a person sees while the run lives, and the record that is kept of the same."""

from __future__ import annotations

from typing import Protocol

from outlast import events
from outlast.observe.store import EventWriter

Beats = dict[str, tuple[int, int, str, float]]


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
