"""`outlast top`: the first screen of a run's page, in a terminal."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from outlast.cli.newest_run import chosen_run
from outlast.cli.output_stream import Printer, echo, print_json
from outlast.errors import EXIT_DONE, RunDirError, UsageError
from outlast.terminal_tables import layout_grid, number_column, table, text_column
from outlast.text_formatting import duration, plural
from outlast.web.run_answers import Level
from outlast.web.run_content import REFRESH_S, RunContent, RunReading, WorkerLine

WORKERS_MAX = 16
_STYLES: dict[Level, str] = {"good": "green", "warn": "yellow", "bad": "red", "plain": "bold"}


def top(
    run_dir: Path | None = None,
    *,
    once: bool = False,
    json: bool = False,
    price_per_hour: float = 0.0,
) -> int:
    """Show how a running job is doing, from another terminal.

    Answers the questions of `outlast view`: is it training, how well, what broke,
    is the state safe, when is it done. Follows the run until it ends or its
    launcher dies; Ctrl-C ends only this view.

    Parameters
    ----------
    run_dir
        Run directory, which `outlast run` printed at its start (default: the newest).
    once
        Print the present state, and end. Without a terminal this is the default.
    json
        Print the present state as one JSON object, and end.
    price_per_hour
        Dollars an hour of the whole job.
    """
    if price_per_hour < 0:
        raise UsageError(f"--price-per-hour {price_per_hour:g} is negative")
    run_dir = chosen_run(run_dir)
    reading = RunReading(run_dir, price_per_hour)
    content = reading.refresh()
    if content is None:
        raise RunDirError(
            f"{run_dir} holds no events of a run; give the directory that `outlast run` printed at"
            " its start"
        )
    if json:
        print_json(
            {
                "summary": content.summary,
                "life": content.life,
                "now_ns": content.now_ns,
                "answers": content.answers,
                "workers": [line._asdict() for line in content.workers],
            }
        )
    elif once or not sys.stdout.isatty():
        echo(_screen(content))
    else:
        _follow(reading, content)
    return EXIT_DONE


def _follow(reading: RunReading, content: RunContent) -> None:
    """Redraw until the run ends, its launcher dies, or Ctrl-C. What was shown last stays."""
    wait = threading.Event()  # never set: it lets Ctrl-C through
    with (
        suppress(KeyboardInterrupt),
        Live(_screen(content), console=Printer(), auto_refresh=False) as live,
    ):
        while content.summary.exit_code is None and content.life != "died":
            wait.wait(REFRESH_S)
            content = reading.refresh() or content
            live.update(_screen(content), refresh=True)


def _screen(content: RunContent) -> RenderableType:
    summary = content.summary
    ranks = plural(summary.world, "rank")
    title = f"{summary.script}: {ranks}, {duration(summary.wall_s)} since its start"
    grid = layout_grid(text_column(style="dim"), text_column())
    for one in content.answers:
        cell = Text(one.figure, style=_STYLES[one.level])
        for line in one.lines:
            cell.append(f"\n{line}", style="not bold default")
        grid.add_row(one.question, cell)
    parts: list[RenderableType] = [Text(title, style="bold"), Text(), grid, Text()]
    return Group(*parts, *_workers(content.workers, is_over=summary.exit_code is not None))


def _workers(lines: list[WorkerLine], *, is_over: bool) -> list[RenderableType]:
    """Return the living workers, ranks first; of those that were lost the number."""
    alive = [line for line in lines if not line.lost]
    if is_over or not alive:
        return []
    grid = table(number_column("rank"), text_column("worker"), text_column("host"))
    for line in alive[:WORKERS_MAX]:
        grid.add_row("spare" if line.rank < 0 else str(line.rank), line.worker, line.host)
    rest, lost = len(alive) - WORKERS_MAX, len(lines) - len(alive)
    notes = [plural(rest, "more worker")] if rest > 0 else []
    notes += [f"{plural(lost, 'worker')} lost before"] if lost else []
    return [grid, Text(", ".join(notes), style="dim")]
