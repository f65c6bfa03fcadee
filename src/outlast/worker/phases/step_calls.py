"""Calls of functions that step, described so that a hot spare can make them before its loop.

A rank describes the first call of each function: where in the script's variables the function and
each argument are found. A call that cannot be described has no dry step in advance.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec

from outlast.worker.script.value_paths import own_frames


class Argument(msgspec.Struct, array_like=True, frozen=True):
    """An argument: the batch, an item of it, a variable of the script, or a plain value."""

    kind: Literal["batch", "item", "variable", "plain"]
    value: int | float | str | bool | None = None


class StepCall(msgspec.Struct, array_like=True, frozen=True):
    """A call of the function `key`, which the script has as the variable `name`."""

    key: str
    name: str
    args: list[Argument]
    kwargs: dict[str, Argument]


class StepCalls:
    """The described calls of one process."""

    def __init__(self) -> None:
        self._calls: dict[str, StepCall | None] = {}

    def note(self, key: str, call: Callable[[], Any], batch: Any) -> None:
        """Describe the first call of `key`, with the loop's first batch."""
        if batch is None or key in self._calls or not isinstance(call, partial):
            return
        frame = next(own_frames(), None)
        variables = variables_of(frame) if frame is not None else {}
        self._calls[key] = _describe(key, call, batch, variables)

    def encode(self) -> bytes:
        """Return the described calls as bytes."""
        return msgspec.msgpack.encode([call for call in self._calls.values() if call is not None])


def decode_calls(data: bytes) -> list[StepCall]:
    """Return encoded calls. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=list[StepCall]) if data else []


def variables_of(frame: types.FrameType) -> dict[str, Any]:
    """Return the variables that a frame of the script sees."""
    return {**frame.f_globals, **frame.f_locals}


def _describe(
    key: str, call: partial[Any], batch: Any, variables: dict[str, Any]
) -> StepCall | None:
    names = {id(value): name for name, value in variables.items()}
    items = {id(each): at for at, each in enumerate(batch)} if _is_sequence(batch) else {}

    def argument(value: Any) -> Argument:
        if value is batch:
            return Argument("batch")
        if id(value) in items:
            return Argument("item", items[id(value)])
        if value is None or type(value) in (int, float, str, bool):
            return Argument("plain", value)
        return Argument("variable", names[id(value)])

    try:
        args = [argument(each) for each in call.args]
        kwargs = {name: argument(each) for name, each in call.keywords.items()}
        return StepCall(key, names[id(call.func)], args, kwargs)
    except KeyError:
        return None


def bind(call: StepCall, batch: Any, variables: dict[str, Any]) -> partial[Any] | None:
    """Return the call with this process's objects, None where the script has no such objects."""

    def value(argument: Argument) -> Any:
        match argument.kind:
            case "batch":
                return batch
            case "item":
                return batch[argument.value]
            case "variable":
                return variables[str(argument.value)]
            case _:
                return argument.value

    try:
        function = variables[call.name]
        args = [value(each) for each in call.args]
        kwargs = {name: value(each) for name, each in call.kwargs.items()}
    except (LookupError, TypeError):
        return None
    return partial(function, *args, **kwargs) if step_key(function) == call.key else None


def _is_sequence(batch: Any) -> bool:
    return type(batch) in (list, tuple)


def step_key(fn: Callable[..., Any]) -> str:
    """Return a name for a phase's function that is equal in all processes of this script."""
    target: Any = fn
    while hasattr(target, "func"):
        target = target.func
    target = getattr(target, "__wrapped__", target)
    if isinstance(target, types.MethodType):
        target = target.__func__
    code = getattr(target, "__code__", None)
    name = getattr(target, "__qualname__", type(target).__qualname__)
    return f"{name}:{code.co_firstlineno}" if code else name
