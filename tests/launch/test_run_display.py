"""Run display: a blocked, closed or broken terminal does not delay the run."""

from __future__ import annotations

import threading

import pytest

from outlast.events import AnyEvent, Note
from outlast.launch.run_display import DetachedDisplay
from outlast.telemetry.run_board import Beats

PATIENCE_S = 30.0


class Terminal:
    """A display whose writes block while `flowing` is not set."""

    def __init__(self) -> None:
        self.flowing = threading.Event()
        self.blocked = threading.Event()
        self.shown: list[str] = []
        self.closed = False

    def _write(self, text: str) -> None:
        self.blocked.set()
        assert self.flowing.wait(PATIENCE_S)
        self.shown.append(text)

    def event(self, event: AnyEvent) -> None:
        assert isinstance(event, Note)
        self._write(event.text)

    def beats(self, beats: Beats) -> None:
        self._write(f"{len(beats)} beats")

    def line(self, text: str, *, is_error: bool) -> None:
        self._write(f"{text}!" if is_error else text)

    def close(self) -> None:
        self.closed = True


def note(text: str) -> Note:
    return Note(t_ns=1, worker="", seat=-1, text=text)


def test_everything_is_shown_in_order() -> None:
    terminal = Terminal()
    terminal.flowing.set()
    shown = DetachedDisplay(terminal)
    shown.event(note("begun"))
    shown.beats({"w": (1, 1, "running", 2.0)})
    shown.line("hello", is_error=True)
    shown.close(PATIENCE_S)
    assert terminal.shown == ["begun", "1 beats", "hello!"] and terminal.closed


def test_a_blocked_terminal_holds_nobody_up_and_the_dropped_are_counted() -> None:
    terminal = Terminal()
    shown = DetachedDisplay(terminal, backlog_max=10)
    shown.line("first", is_error=False)
    assert terminal.blocked.wait(PATIENCE_S)  # the view is stuck in a write now
    for k in range(100):
        shown.line(str(k), is_error=False)  # returns, or this test hangs
    shown.close(0.01)  # gives up on a terminal that takes nothing
    assert terminal.shown == [] and not terminal.closed
    terminal.flowing.set()
    shown.close(PATIENCE_S)
    assert terminal.shown[:11] == ["first", *map(str, range(10))]
    assert "90 lines and events were not shown" in terminal.shown[11]
    assert terminal.closed


def test_a_view_that_fails_is_told_once_and_taken_no_further(
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal = Terminal()
    terminal.flowing.set()
    shown = DetachedDisplay(terminal)
    shown.event("no event")  # type: ignore[arg-type]
    for _ in range(20):
        shown.line("more", is_error=False)
    shown.close(PATIENCE_S)
    assert capsys.readouterr().err.count("view failed, the run continues") == 1
    assert terminal.shown == []
