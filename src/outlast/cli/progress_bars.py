"""Progress bars of commands, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from outlast.cli.output_stream import Printer

OnProgress = Callable[[int, int], None]


@contextmanager
def _progress(title: str, *columns: ProgressColumn) -> Iterator[OnProgress]:
    console = Printer(stderr=True)
    if not console.is_terminal:
        yield lambda _done, _total: None
        return
    text = TextColumn("{task.description}", markup=False)
    shown = (text, BarColumn(), *columns, TimeRemainingColumn())
    with Progress(*shown, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def count_progress(title: str) -> AbstractContextManager[OnProgress]:
    """Return a context whose value takes the number of items done, and of all."""
    return _progress(title, MofNCompleteColumn())


def byte_progress(title: str) -> AbstractContextManager[OnProgress]:
    """Return a context whose value takes the bytes done and in total, from any thread."""
    return _progress(title, DownloadColumn(binary_units=True), TransferSpeedColumn())
