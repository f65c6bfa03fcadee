"""Progress bars of `outlast ckpt`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from outlast.cli.output_stream import Printer

Tell = Callable[[int, int], None]


@contextmanager
def progress(title: str) -> Iterator[Tell]:
    """Yield a callback of the bytes done and in total; safe to call from any thread."""
    console = Printer(stderr=True)
    if not console.is_terminal:
        yield lambda _done, _all: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, all_: bar.update(task, completed=done, total=all_)
