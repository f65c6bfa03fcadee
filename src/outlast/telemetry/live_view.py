"""Views of a live run: tables on a terminal, lines elsewhere; both are Displays."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from outlast.events import (
    AnyEvent,
    AttemptRefused,
    CheckpointFailed,
    CheckpointSaved,
    DrainFailed,
    FaultInjected,
    LoopBegun,
    Metrics,
    Note,
    Noticed,
    PhaseDone,
    RunEnded,
    RunStarted,
    Warned,
)
from outlast.telemetry.event_store import EventClock, EventReader
from outlast.telemetry.run_board import Beats, RunBoard, WorkerRow, headline, milestone, progress
from outlast.terminal_tables import number_column, table, text_column
from outlast.text_formatting import duration, plural

REFRESH_PER_S = 4
POLL_S = 1.0
PROGRESS_S = 5.0
SEATS_MAX = 16
INCIDENTS_MAX = 5
NOTES_MAX = 3
_STATE_STYLE = {
    "running": "green",
    "sharing": "green",
    "voting": "green",
    "applying": "green",
    "idle": "green",
    "checkpoint": "magenta",
    "healing": "yellow",
    "dry": "yellow",
    "setup": "blue",
    "starting": "blue",
    "waiting": "blue",
    "finished": "bright_black",
}


class LiveFeed:
    """Source of an up-to-date board.

    The launcher delivers its events directly; phases of workers are read from the event store every
    `POLL_S` seconds.
    """

    def __init__(self, run_dir: Path | None) -> None:
        self.board = RunBoard()
        self.lock = threading.RLock()
        self._clock = EventClock()
        self._reader = EventReader(run_dir, lambda _damage: None) if run_dir else None
        self._polled_ns = 0
        self._held: list[AnyEvent] = []  # read, not yet applied to the board

    def now_ns(self) -> int:
        """Return the present time of the event clock, in ns since the epoch."""
        return self._clock.now_ns()

    def take(self, event: AnyEvent) -> None:
        """Update the board with one event of the controller, after the workers' earlier ones."""
        with self.lock:
            if isinstance(event, RunStarted):
                self._look_back(event)
            if isinstance(event, Noticed | RunEnded):
                self.poll(until_ns=event.t_ns)  # read the workers' earlier commits first
            self.board.take(event)

    def beat(self, beats: Beats) -> None:
        """Update the board with the beats of workers."""
        with self.lock:
            self.board.beat(beats, self.now_ns())

    def _look_back(self, started: RunStarted) -> None:
        """Continue the numbers of incidents from earlier launchers of the run."""
        earlier = self._new()
        self._held = [event for event in earlier if event.t_ns >= started.t_ns]
        for event in earlier[: len(earlier) - len(self._held)]:
            self.board.tracker.take(event)

    def _new(self) -> list[AnyEvent]:
        records, self._held = self._held, []
        try:
            return records + (self._reader.poll() if self._reader else [])
        except OSError:
            return records  # the display is optional: the next poll retries

    def poll(self, *, until_ns: int = 0) -> None:
        """Read new records of workers if a read is due, or at once those up to `until_ns`."""
        now_ns = self.now_ns()
        due = until_ns or now_ns - self._polled_ns >= POLL_S * 1e9
        if self._reader is None or not due or not self.board.begin_ns:
            return
        self._polled_ns = now_ns
        for event in self._new():
            of_worker = isinstance(
                event,
                PhaseDone
                | AttemptRefused
                | Metrics
                | FaultInjected
                | LoopBegun
                | CheckpointSaved
                | CheckpointFailed,
            )
            if of_worker and until_ns and event.t_ns > until_ns:
                self._held.append(event)
            elif of_worker and event.t_ns >= self.board.begin_ns:  # older: an earlier term's
                self.board.take(event)


class LiveDisplay:
    """Tables on a terminal that redraw themselves. `close` removes them."""

    def __init__(
        self,
        run_dir: Path | None = None,
        *,
        console: Console | None = None,
        lines: TextIO | None = None,
    ) -> None:
        self._console = console or Console(stderr=True)
        self._lines = lines or sys.stdout
        self._shared = self._lines.isatty()  # workers' lines and the view share one screen
        self.feed = LiveFeed(run_dir)
        self._notes: list[str] = []
        self._live = Live(
            get_renderable=self._draw,
            console=self._console,
            refresh_per_second=REFRESH_PER_S,
            transient=True,
            redirect_stdout=self._shared,
        )
        self._live.start()

    def event(self, event: AnyEvent) -> None:
        """Show one event; print warnings and milestones above the display."""
        self.feed.take(event)
        text = event.text if isinstance(event, Note) and event.level == "warning" else ""
        if isinstance(event, DrainFailed | Warned):
            text = milestone(event)
        if text:
            self._notes = [*self._notes, text][-NOTES_MAX:]

    def beats(self, beats: Beats) -> None:
        """Update the display with the beats of workers."""
        self.feed.beat(beats)

    def line(self, text: str, *, is_error: bool) -> None:
        """Print one line of a worker's output, above the display if it goes to the terminal."""
        if self._shared or is_error:
            self._console.print(Text.from_ansi(text), soft_wrap=True)
        else:
            _write(self._lines, f"{text}\n")

    def close(self) -> None:
        """Stop the display."""
        self._live.stop()

    def _draw(self) -> RenderableType:
        with self.feed.lock:
            self.feed.poll()
            return view(self.feed.board, self.feed.now_ns(), self._notes)


class LineDisplay:
    """Progress as plain lines, for logs and pipes.

    Milestones and incidents at once, the position of the run every `PROGRESS_S` seconds.
    """

    def __init__(
        self,
        run_dir: Path | None = None,
        *,
        lines: TextIO | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self._lines = lines or sys.stdout
        self._stream = stream or sys.stderr
        self.feed = LiveFeed(run_dir)
        self._next_ns = self.feed.now_ns() + round(PROGRESS_S * 1e9)
        self._printed = 0

    def event(self, event: AnyEvent) -> None:
        """Print one event, if it deserves a line."""
        self.feed.take(event)
        tracker = self.feed.board.tracker
        if isinstance(event, RunStarted):
            self._printed = tracker.count
        text = event.text if isinstance(event, Note) else milestone(event, tracker.count)
        if text:
            self._print(text)
        if isinstance(event, Noticed):
            self._print(headline(tracker.found(1)[0]))
        elif isinstance(event, RunEnded):
            self._print_recovered()

    def beats(self, beats: Beats) -> None:
        """Update the progress; print a line of it from time to time."""
        self.feed.beat(beats)
        self.feed.poll()
        self._print_recovered()
        now_ns = self.feed.now_ns()
        if now_ns >= self._next_ns and self.feed.board.step:
            self._next_ns = now_ns + round(PROGRESS_S * 1e9)
            self._print(progress(self.feed.board, now_ns))

    def line(self, text: str, *, is_error: bool) -> None:
        """Print one line of a worker's output."""
        _write(self._stream if is_error else self._lines, f"{text}\n")

    def close(self) -> None:
        """Print the recovered incidents not printed yet."""
        self._print_recovered()

    def _print_recovered(self) -> None:
        """Print each incident again once it is recovered, with its cost."""
        tracker = self.feed.board.tracker
        count = tracker.count - self._printed
        for one in tracker.found(count) if count > 0 else []:
            if one.state == "open":
                break
            self._printed = one.number
            self._print(headline(one))

    def _print(self, text: str) -> None:
        _write(self._stream, f"outlast: {text}\n")


def display(
    run_dir: Path, *, plain: bool = False, lines: TextIO | None = None
) -> LiveDisplay | LineDisplay:
    """Return the view for stderr: tables on a terminal, lines elsewhere or when `plain`.

    Workers' own lines go to `lines` (default: stdout).
    """
    console = Console(stderr=True)
    lines = lines or sys.stdout
    if plain or not console.is_terminal or console.is_dumb_terminal:
        return LineDisplay(run_dir, lines=lines)
    return LiveDisplay(run_dir, console=console, lines=lines)


def view(board: RunBoard, now_ns: int, notes: list[str]) -> RenderableType:
    """Return the board as one panel."""
    parts: list[RenderableType] = [Text(progress(board, now_ns), style="bold"), _ranks(board)]
    shown = min(INCIDENTS_MAX, board.incidents)
    for incident in board.tracker.found(shown) if shown else []:
        style = {"recovered": "green", "stopped": "red"}.get(incident.state, "yellow")
        parts.append(Text(headline(incident, brief=True), style=style))
    parts += [Text(f"note: {note}", style="yellow") for note in notes]
    up = duration((now_ns - board.begin_ns) / 1e9) if board.begin_ns else "starting"
    title = Text.assemble("outlast: ", (board.script or "...", "bold"))
    border = "yellow" if board.recovering else "green" if board.generation else "blue"
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        subtitle=Text(up, style="dim"),
        subtitle_align="right",
        border_style=border,
        box=box.ROUNDED,
    )


def _ranks(board: RunBoard) -> RenderableType:
    figures = map(number_column, ("generation", "step", "loss"))
    grid = table(number_column("rank"), text_column("worker"), *figures, text_column("state"))
    seats = board.seats
    # The slowest first where not all fit: the others wait for them.
    shown = seats if len(seats) <= SEATS_MAX else sorted(seats, key=_behind)[:SEATS_MAX]
    for row in shown:
        grid.add_row(
            str(row.seat), row.worker, str(row.generation), str(row.step), _loss(row), _state(row)
        )
    if len(seats) > len(shown):
        grid.add_row("...", plural(len(seats) - len(shown), "more rank"), "", "", "", Text(""))
    for row in board.spares:
        grid.add_row("spare", row.worker, "", "", "", _state(row))
    return grid


def _behind(row: WorkerRow) -> tuple[int, int]:
    return row.n, row.seat


def _loss(row: WorkerRow) -> str:
    return "-" if row.loss is None else f"{row.loss:.4f}"


def _state(row: WorkerRow) -> Text:
    return Text(row.state, style=_STATE_STYLE.get(row.state, "red"))


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):  # ValueError: the stream is closed
        pass  # a closed terminal must not end the run; the log files are complete
