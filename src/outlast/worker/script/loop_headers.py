"""Expressions that the script's loops iterate over, of which some cannot be continued elsewhere."""

from __future__ import annotations

import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile

from outlast.worker.script.bytecode import gathering, is_outlasts_file, iterated_names
from outlast.worker.script.value_paths import own_frames, suspended

# Iterators of the standard library that keep what they have seen.
_NAMES = (
    *("accumulate", "batched", "chain", "count", "cycle", "dropwhile", "groupby", "islice"),
    *("pairwise", "takewhile", "tee", "zip_longest"),
)
_IN_PLACE = {
    "enumerate": "number the batches by session.enumerate, or by session.step_index",
    "islice": "give session.batches the loader itself, and break behind the last step",
    "zip": "give session.batches one loader, and count by session.enumerate or session.step_index",
}
_KEEPERS = [enumerate, zip, *(getattr(itertools, name, zip) for name in _NAMES)]


def _keeper_in(frame: types.FrameType) -> str:
    """Return the name of an iterator that keeps what it has seen, in the expression that the `for`
    of `frame` iterates over; "" for none."""
    spaces = (frame.f_locals, frame.f_globals, frame.f_builtins)
    names = sorted(iterated_names(frame.f_code, frame.f_lasti))
    values = [next((space[name] for space in spaces if name in space), None) for name in names]
    if any(value is itertools for value in values):
        names = [name.removeprefix(".") for name in names]
        values += [getattr(itertools, name, None) for name in names]
        names *= 2
    found = zip(names, values, strict=True)
    return next((name for name, value in found if any(value is each for each in _KEEPERS)), "")


def refuse_header(refuse: Callable[..., None], name: str) -> None:
    """Refuse a loop over session.`name` that another process could not continue: through an
    iterator with a place of its own (`enumerate`, `zip`), or inside an expression, whose results so
    far no other process could read. Called while the loop takes its next value."""
    _refuse_gathering(refuse, name)
    frames = list(own_frames())  # the loop's own is behind those of generators around the batches
    count = 1 + sum(1 for _ in takewhile(is_generator, frames))
    if keeper := next(filter(None, map(_keeper_in, frames[:count])), ""):
        refuse(
            f"the loop over session.{name} goes through {keeper}(...), which restarts in a"
            " replacement worker",
            _IN_PLACE.get(keeper, "give session.batches the loader itself")
            if name == "batches"
            else "session.epochs yields the numbers of epochs; loop over it alone",
        )


_waiting: list[types.FrameType] = []  # generators around the batches, of the newest draw


@contextmanager
def generators_suspended() -> Iterator[None]:
    """Keep the frames of the script's generators, through which its loop draws from the caller,
    readable while they wait for the next draw."""
    frames = list(takewhile(is_generator, own_frames()))
    _forget_waiting()  # of a loop that the script has left, whose generators may still exist
    _waiting.extend(frames)
    suspended.extend(frames)
    try:
        yield
    finally:
        if _waiting == frames:
            _forget_waiting()


def _forget_waiting() -> None:
    for frame in _waiting:
        suspended.remove(frame)
    _waiting.clear()


def is_generator(frame: types.FrameType) -> bool:
    """Return whether a frame is that of a generator."""
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR)


def continued(numbers: range, rest: list[int] | None, turn: int) -> range:
    """Return the epochs that follow from a place: its number and the next ones of `numbers`, the
    script's range in this process.

    `rest`: the range from the place's number on in the process that recorded it; None in run
    directories of old versions. It holds where the script's range begins later, since it begins
    behind the newest checkpoint of the script's own.
    """
    if rest is None:
        return numbers[turn:]
    if rest[0] < numbers.start:
        return range(*rest)
    return numbers[numbers.index(rest[0]) :] if rest[0] in numbers else range(0)


def _refuse_gathering(refuse: Callable[..., None], name: str) -> None:
    """Refuse a loop inside a comprehension, `list(...)`. The frames looked at are generators, and
    the function that takes the values."""
    frame = sys._getframe(3).f_back  # noqa: SLF001 - no other access to the script's frames
    gathered, is_last = "", False
    while frame is not None and not is_last and not gathered:
        if not is_outlasts_file(frame.f_code.co_filename):
            gathered = gathering(frame.f_code, frame.f_lasti)
            is_last = not is_generator(frame)
        frame = frame.f_back
    if gathered:
        refuse(
            f"the loop over session.{name} is inside {gathered}, whose results so far no"
            " replacement worker could read",
            "loop in a for statement, and append what you keep to a list",
        )
