"""Output of commands: streams whose reader may close them, JSON, and progress bars."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from outlast.errors import StorageError

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

_LAYOUT = "\n\t"  # control characters of our own texts


class Printer(Console):
    """Console that escapes control characters and survives a closed pipe.

    Names are printed as they are except for control characters (see `visible`). After the reader
    has closed the pipe, a command continues to its own exit code.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False)
        _forgive(self.file)

    def print(self, *objects: Any, **how: Any) -> None:
        """Print as Console does. Raises StorageError where stdout cannot be written."""
        with contextlib.nullcontext() if self.stderr else _written():
            super().print(*objects, **how)

    def on_broken_pipe(self) -> None:
        """Discard further output when the reader of the pipe is closed."""
        mute(sys.stderr if self.stderr else sys.stdout)

    def render_str(self, text: str, **how: Any) -> Text:
        """Return plain text of one line or table cell, with control characters escaped."""
        return super().render_str(visible(text), **how)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render with control characters of texts made visible."""
        if isinstance(renderable, Text):
            plain = visible(renderable.plain, keep=_LAYOUT)
            if plain != renderable.plain:
                renderable = renderable.blank_copy(plain)
        return super().render(renderable, options)


def visible(text: str, keep: str = "") -> str:
    """Escape invisible characters of `text` as Python does; those in `keep` stay.

    Invisible: control characters, direction marks, lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode()
        for each in text
    )


def echo(what: RenderableType) -> None:
    """Print one line, a table or a tree to stdout. Raises StorageError if that fails."""
    Printer().print(what, soft_wrap=isinstance(what, str))


def print_json(value: Any) -> None:
    """Print one line of JSON to stdout."""
    import msgspec  # here, so that a help text starts without it

    write(msgspec.json.encode(value).decode() + "\n")


def write(text: str) -> None:
    """Write to stdout unless its pipe is closed. Raises StorageError where it cannot be written."""
    with _written():
        sys.stdout.write(text)
        sys.stdout.flush()


def pour(lines: Iterable[str], *, live: bool = False) -> None:
    """Write lines to stdout until its reader closes the pipe (BrokenPipeError).

    `live`: flush each line. Raises StorageError where one cannot be written.
    """
    for line in lines:
        try:
            sys.stdout.write(line + "\n")
            if live:
                sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _unwritten(error) from error


def finish() -> None:
    """Flush stdout. Raises StorageError where that fails."""
    with _written():
        sys.stdout.flush()


@contextlib.contextmanager
def _written() -> Iterator[None]:
    _forgive(sys.stdout)
    try:
        yield
    except BrokenPipeError:
        # The reader (`head`, a pager) closed the pipe; write nothing at exit either.
        mute(sys.stdout)
    except OSError as error:
        raise _unwritten(error) from error


def _unwritten(error: OSError) -> StorageError:
    mute(sys.stdout)
    return StorageError(f"the output could not be printed in full: {error.strerror or error}")


def _forgive(stream: object) -> None:
    """Make a stream escape characters that its encoding lacks, instead of raising."""
    if isinstance(stream, TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
        stream.reconfigure(errors="backslashreplace")


def mute(stream: TextIO) -> None:
    """Discard the buffer of `stream` and all later output.

    The interpreter flushes at its exit, and would end with its own exit code where that fails.
    """
    with contextlib.suppress(OSError, ValueError):  # ValueError: no file, or closed already
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def settle() -> None:
    """Flush stdout and stderr; mute the one that cannot be flushed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            mute(stream)


def echo_error(text: str) -> None:
    """Print a line to stderr unless its pipe is closed."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        mute(sys.stderr)


OnProgress = Callable[[int, int], None]


@contextmanager
def _progress(title: str, *columns: ProgressColumn) -> Iterator[OnProgress]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

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
    from rich.progress import MofNCompleteColumn

    return _progress(title, MofNCompleteColumn())


def byte_progress(title: str) -> AbstractContextManager[OnProgress]:
    """Return a context whose value takes the bytes done and in total, from any thread."""
    from rich.progress import DownloadColumn, TransferSpeedColumn

    return _progress(title, DownloadColumn(binary_units=True), TransferSpeedColumn())
