"""Phases that work on the loop's newest batch, beside the one that counts as its step.

A rank without a batch of its own (rank_deal.py) reads another rank's, and adds nothing to sums in
all phases that work on it: a second optimizer's, a metric's. An evaluation has data of its own.
"""

from __future__ import annotations

import dis
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from outlast.errors import UsageError
from outlast.worker.script.bytecode import is_outlasts_file, is_own_file

_DEPTH = 3  # of containers in a batch
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class BatchUse:
    """Objects of the newest batch, and of what the script has made of them for its step. Tensors
    are not kept alive."""

    def __init__(self) -> None:
        self._known: dict[int, Callable[[], Any]] = {}

    def draw(self, batch: Any, *, is_second: bool = False) -> None:
        """Forget the batch before, and note the objects of this one. `is_second`: no phase has
        worked on the one before. Raises UsageError if the script draws both by `next`, and may have
        kept the first one, which a replacement worker would not draw."""
        if is_second and _is_drawn_by_call():
            raise UsageError(
                "a second batch of session.batches is drawn by next() before a phase has worked on"
                " the first one, which a replacement worker could not draw again: draw one batch"
                " for each phase, loop over session.batches in a for statement, or let it give the"
                " batches of a step as a list (batches_per_step=N)"
            )
        self._known = {}
        self._note(batch)

    def step(self, call: Callable[[], Any]) -> None:
        """Note the tensors that the step of the batch gets: copies on a device."""
        for value in _arguments(call):
            for each in _leaves(value):
                if isinstance(each, torch.Tensor):
                    self._note(each)

    def holds(self, call: Callable[[], Any]) -> bool:
        """Return whether a phase gets an object of the batch, or reads one by a variable."""
        values = (*_arguments(call), *_variables(call))
        return any(self._is_known(each) for value in values for each in _leaves(value))

    def _note(self, value: Any) -> None:
        for each in _leaves(value):
            try:
                self._known[id(each)] = weakref.ref(each)
            except TypeError:
                self._known[id(each)] = partial(_same, each)

    def _is_known(self, value: Any) -> bool:
        known = self._known.get(id(value))
        return known is not None and known() is value


def _is_drawn_by_call() -> bool:
    """Return whether the script's code takes the next batch by a call, not in a `for` statement."""
    frame: types.FrameType | None = sys._getframe(2)  # noqa: SLF001 - no other access to the script's frames
    while frame is not None:
        code = frame.f_code
        operation = dis.opname[code.co_code[frame.f_lasti]]
        if not is_outlasts_file(code.co_filename) and operation != "SEND":  # `yield from`
            return is_own_file(code.co_filename) and operation != "FOR_ITER"
        frame = frame.f_back
    return False


def _same(value: Any) -> Any:
    return value


def _leaves(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield the objects in containers, but no plain values, which others may share."""
    if isinstance(value, (list, tuple, dict)) and depth:
        items: Any = value.values() if isinstance(value, dict) else value
        for each in items:
            yield from _leaves(each, depth - 1)
        yield value
    elif not isinstance(value, _PLAIN):
        yield value


def _arguments(call: Callable[[], Any]) -> tuple[Any, ...]:
    return (*call.args, *call.keywords.values()) if isinstance(call, partial) else ()


def _variables(call: Callable[[], Any]) -> Iterator[Any]:
    """Yield what a phase's function reads by global variables, cells, and attributes of `self`."""
    target: Any = call
    while hasattr(target, "func"):
        target = target.func
    attributes: dict[str, Any] = {}
    if isinstance(target, types.MethodType):
        attributes = getattr(target.__self__, "__dict__", {})
        target = target.__func__
    target = getattr(target, "__wrapped__", target)
    if not isinstance(target, types.FunctionType):
        return
    for name in target.__code__.co_names:
        for room in (target.__globals__, attributes):
            if name in room:
                yield room[name]
    for cell in target.__closure__ or ():
        if cell != types.CellType():  # else it is empty
            yield cell.cell_contents
