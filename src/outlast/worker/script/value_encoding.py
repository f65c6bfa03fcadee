"""Encoding of the script's values: plain data by value, functions and classes by name."""

from __future__ import annotations

import dataclasses
import io
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Hashable
from enum import Enum
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn

from outlast import random_state
from outlast.checkpoint.format import codec
from outlast.errors import CodecError
from outlast.random_state import GENERATOR_TYPES
from outlast.worker.script.value_paths import PathGone, is_own_class, is_own_file

VALUE_BYTES_MAX = 1 << 20
_NODES_MAX = 20_000  # of one container
CONTAINERS = (list, tuple, dict, OrderedDict, defaultdict, Counter, set, frozenset, deque)
_OTHERS = (np.generic, torch.Size, torch.dtype, io.IOBase)
PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SMALL = frozenset({bool, int, str, type(None)})  # equal ones are the same bytes: floats are not
_TEXT_MAX = 64  # characters of a string whose bytes are kept
_GENERATOR, _DEQUE, _FILE = "outlast.generator", "outlast.deque", "outlast.file"
_MAXLEN = "maxlen"
_SERIES = {"list": list, "tuple": tuple, "deque": deque}
_OF_RECORDS = "outlast.records"  # a list, tuple or deque with items that are found by name


def outward(value: Any) -> Any:
    """Return generators, deques and references as data that `codec` encodes; else the value."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, GENERATOR_TYPES):
        return {_GENERATOR: random_state.states({"it": value})}
    if type(value) in _SERIES.values() and any(map(_is_record, set(map(type, value)))):
        return {_OF_RECORDS: [type(value).__name__, [*map(outward, value)], _maxlen(value)]}
    if type(value) is deque:
        return {_DEQUE: list(value), _MAXLEN: value.maxlen}
    if isinstance(value, io.IOBase):
        place = place_in_file(value)
        return value if place is None else {_FILE: place}
    reference = _reference(value)
    return value if reference is None else reference


def refill(live: Any, saved: Any, *, in_place: bool) -> tuple[Any, bool]:
    """Put `saved` into the container or generator `live` if the types agree. Return the value and
    whether it is `live` itself. `in_place`: write into the memory of a tensor or array, too, which
    other values may share."""
    if isinstance(live, GENERATOR_TYPES):
        if isinstance(saved, dict) and _GENERATOR in saved:
            random_state.restore_state({"it": live}, saved[_GENERATOR])
            return live, True
        raise PathGone("a generator")
    if isinstance(saved, dict) and _GENERATOR in saved:
        return random_state.make_generator(saved[_GENERATOR]["it"]), False
    if isinstance(saved, dict) and _FILE in saved:
        name, place = saved[_FILE]
        if not isinstance(live, io.IOBase) or live.closed or getattr(live, "name", "") != name:
            raise PathGone("a file")
        live.seek(place)
        return live, True
    if _is_saved_reference(saved):
        return _resolved(saved), False
    new: Any = saved
    if isinstance(saved, dict) and _DEQUE in saved:
        new = deque(saved[_DEQUE], saved.get(_MAXLEN, _maxlen(live)))
    if isinstance(saved, dict) and _OF_RECORDS in saved:
        kind, items, maxlen = saved[_OF_RECORDS]
        items = map(_resolved, items)
        new = deque(items, maxlen) if kind == "deque" else _SERIES[kind](items)
    if type(live) is nn.Parameter and type(new) is torch.Tensor:
        new = nn.Parameter(new, requires_grad=False)  # with a gradient it is not saved
    if type(live) is not type(new):
        return new, False
    if isinstance(live, list):
        live[:] = new
    elif isinstance(live, (dict, set)):
        live.clear()
        live.update(new)
    elif type(live) is deque:
        live.clear()
        live.extend(new)
    elif isinstance(live, torch.Tensor) and in_place and live.shape == new.shape:
        with torch.no_grad():
            live.copy_(new)
    elif isinstance(live, np.ndarray) and in_place and live.shape == new.shape:
        live[...] = new
    else:
        return new, False
    return live, True


def _maxlen(value: Any) -> int | None:
    return value.maxlen if type(value) is deque else None


def written(value: Any) -> bytes | None:
    """Return the value encoded without pickle; None if that is impossible or too large."""
    if type(value) in _SMALL and (type(value) is not str or len(value) <= _TEXT_MAX):
        return _written_small(value)
    if isinstance(value, (type, types.FunctionType, nn.Module, torch.device)):
        return None
    if type(value) not in PLAIN and not _fits(value):
        return None
    try:
        return codec.encode(outward(value))
    except CodecError:
        return None


@lru_cache(maxsize=4096, typed=True)
def _written_small(value: Hashable) -> bytes:
    return codec.encode(value)


def place_in_file(value: io.IOBase) -> list[Any] | None:
    """Return the name of a file that is only read, and its position; None for others, and while
    code iterates over its lines, which hides the position."""
    try:
        if value.readable() and value.seekable() and not value.writable():
            return [getattr(value, "name", ""), value.tell()]
    except (OSError, ValueError):  # closed, or iterated over
        return None
    return None


def _fits(value: Any) -> bool:
    """Return whether the value is within the limits, by a bounded walk."""
    room, nodes, todo = VALUE_BYTES_MAX, _NODES_MAX, [value]
    while todo:
        each = todo.pop()
        nodes -= 1
        if isinstance(each, torch.Tensor):
            if each.requires_grad:
                return False
            room -= each.numel() * each.element_size()
        elif isinstance(each, np.ndarray):
            room -= each.nbytes
        elif isinstance(each, (str, bytes)):
            room -= len(each)
        elif isinstance(each, CONTAINERS):
            if len(each) > nodes:
                return False
            todo += [*each.keys(), *each.values()] if isinstance(each, dict) else each
        elif _is_record(type(each)):
            todo += [getattr(each, name, None) for name in _record_fields(type(each)) or ()]
        elif not isinstance(each, (*PLAIN, *GENERATOR_TYPES, *_OTHERS)):
            return False
        if room < 0 or nodes < 0:
            return False
    return True


# --- values that another process finds by their names ---

_NAMED, _MEMBER = "outlast.named", "outlast.member"
_RECORD, _PARTIAL = "outlast.record", "outlast.partial"
_REFERENCES = {_NAMED, _MEMBER, _RECORD, _PARTIAL}
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
# Only pure functions of libraries: a saved name must not give access to files or to other code.
_PURE = ("torch.nn.functional", "torch")


def is_reference(value: Any) -> bool:
    """Return whether another process finds the value by name.

    This holds for functions and classes of the script, functions of `torch.nn.functional`, members
    of enumerations, and frozen dataclasses, named tuples and partials of these and plain values.
    """
    return _reference(value) is not None


def _reference(value: Any) -> dict[str, Any] | None:
    kind = type(value)
    if isinstance(value, (*_FUNCTIONS, type)):
        place = _place_of(value)
        return {_NAMED: place} if place else None
    if kind is partial:
        function = _reference(value.func)
        given = [[*map(outward, value.args)], {k: outward(v) for k, v in value.keywords.items()}]
        return {_PARTIAL: [function, *given]} if function else None
    place = _place_of(kind) if is_own_class(kind) else None
    if place is None:
        return None
    if isinstance(value, Enum):
        is_member = kind.__members__.get(value.name or "") is value
        return {_MEMBER: [*place, value.name]} if is_member else None
    names = _record_fields(kind)
    if names is None or not all(hasattr(value, name) for name in names):
        return None
    return {_RECORD: [*place, {name: outward(getattr(value, name)) for name in names}]}


def _is_record(kind: type) -> bool:
    """Return whether instances of the class are members of the script's enumeration, or records."""
    if kind in PLAIN or not is_own_class(kind):
        return False
    return issubclass(kind, Enum) or _record_fields(kind) is not None


def _record_fields(kind: type) -> list[str] | None:
    """Return the fields of a class with immutable instances; None for other classes."""
    if dataclasses.is_dataclass(kind) and getattr(kind, "__dataclass_params__").frozen:  # noqa: B009 - pyright does not know it
        return [field.name for field in dataclasses.fields(kind)]
    return list(getattr(kind, "_fields", ())) if issubclass(kind, tuple) else None


def _place_of(thing: Any) -> list[str] | None:
    """Return the module and the qualified name of a function or a class."""
    if isinstance(thing, types.BuiltinFunctionType):
        places = [[module, thing.__name__] for module in _PURE]
    else:
        places = [[thing.__module__, thing.__qualname__]]
    return next((place for place in places if _named(*place) is thing), None)


def _named(module: str, name: str) -> Any:
    """Return the object that a module itself defines, or a builtin function of torch; else None.

    Imported names do not count: `os` of a script is not found.
    """
    space = sys.modules.get(module)
    value: Any = vars(space).get(name) if space else None
    if isinstance(value, types.BuiltinFunctionType):
        return value if module in _PURE else None
    is_own = module == "__main__" or is_own_file(getattr(space, "__file__", None) or "<frozen")
    if not is_own and module != _PURE[0]:
        return None
    first, *inner = name.split(".")
    value = vars(space).get(first) if space else None
    for part in inner:
        value = vars(value).get(part) if isinstance(value, type) else None
        value = value.__func__ if isinstance(value, staticmethod) else value
    is_defined_there = getattr(value, "__module__", None) == module
    return value if is_defined_there and isinstance(value, (types.FunctionType, type)) else None


def _is_saved_reference(saved: Any) -> bool:
    return isinstance(saved, dict) and len(saved) == 1 and not _REFERENCES.isdisjoint(saved)


def _resolved(saved: Any) -> Any:
    """Return the object that a saved reference names. Raises PathGone if this process lacks it."""
    if not _is_saved_reference(saved):
        return refill(None, saved, in_place=False)[0]
    ((kind, content),) = saved.items()
    if kind == _PARTIAL:
        function, given, named = content
        return partial(
            _resolved(function),
            *map(_resolved, given),
            **{name: _resolved(value) for name, value in named.items()},
        )
    found = _named(content[0], content[1])
    if kind == _NAMED and isinstance(found, (*_FUNCTIONS, type)):
        return found
    if isinstance(found, type) and issubclass(found, Enum) and kind == _MEMBER:
        return found[content[2]]
    names = _record_fields(found) if isinstance(found, type) and kind == _RECORD else None
    if names is None or names != list(content[2]):
        raise PathGone(f"{content[0]}.{content[1]}")
    values = [_resolved(content[2][name]) for name in names]
    if issubclass(found, tuple):
        return tuple.__new__(found, values)
    record = object.__new__(found)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(record, name, value)
    return record
