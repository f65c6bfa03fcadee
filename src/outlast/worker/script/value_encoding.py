"""Encoding of the script's values: plain data by value, functions and classes by name."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from enum import Enum
from functools import partial
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from outlast import random_state
from outlast.checkpoint.format import codec
from outlast.errors import CodecError
from outlast.random_state import GENERATOR_TYPES
from outlast.worker.script.value_paths import PathGone, is_own_class, is_own_file

VALUE_BYTES_MAX = 1 << 20
_NODES_MAX = 20_000  # of one container
CONTENT_BYTES_MAX = 64 << 20  # of one array in a container
CHUNK_BYTES = 1 << 16
CHUNKS_MAX = 1024  # of one container or array that are looked at at once
_PLAIN_ITEMS = 256  # that are encoded at once
# What takes as long as these bytes of an array: one object, and one byte of plain items.
_OBJECT_BYTES, _ENCODED_BYTES = 1024, 4
ITEMS_MAX = 256  # of one container that cannot be written down, to be visited one by one
CONTAINERS = (list, tuple, dict, OrderedDict, defaultdict, Counter, set, frozenset, deque)
PLAIN = (bool, int, float, complex, str, bytes, type(None))
_GENERATOR, _DEQUE = "outlast.generator", "outlast.deque"


def outward(value: Any) -> Any:
    """Return generators, deques and references as data that `codec` encodes; else the value."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, GENERATOR_TYPES):
        return {_GENERATOR: random_state.states({"it": value})}
    if type(value) is deque:
        return {_DEQUE: list(value)}
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
    if _is_saved_reference(saved):
        return _resolved(saved), False
    new: Any = saved
    if isinstance(saved, dict) and _DEQUE in saved:
        new = deque(saved[_DEQUE], live.maxlen if type(live) is deque else None)
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


def written(value: Any) -> bytes | None:
    """Return the value encoded without pickle; None if that is impossible or too large."""
    if isinstance(value, (type, types.FunctionType, nn.Module, torch.device)):
        return None
    if type(value) not in PLAIN and not _fits(value):
        return None
    try:
        return codec.encode(outward(value))
    except CodecError:
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
        elif not isinstance(each, (*PLAIN, *GENERATOR_TYPES, np.generic, torch.Size, torch.dtype)):
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
        return saved
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


# --- fingerprints of values that cannot be encoded ---

_OPAQUE = (enumerate, zip, map, filter)


def look_of(value: Any, protected: Collection[int]) -> Any:
    """Return a fingerprint of a value that cannot be encoded: equal while it seems unchanged.

    `protected`: ids of objects whose content may change.
    """
    if isinstance(value, torch.Tensor):
        return "tensor", id(value), value.data_ptr() if _has_memory(value) else 0, value._version  # noqa: SLF001 - torch's own counter of changes
    if isinstance(value, types.GeneratorType):
        return "generator", id(value), value.gi_frame and value.gi_frame.f_lasti, _locals(value)
    if isinstance(value, (list, dict, set, deque)):
        are_visited = isinstance(value, (list, dict)) and len(value) <= ITEMS_MAX
        return (
            "container",
            id(value),
            len(value),
            None if are_visited else _look_inside(value, protected),
        )
    if isinstance(value, np.ndarray):
        return "array", id(value), value.shape, _look_inside(value, protected)
    if _is_library_iterator(value):
        return "iterator", id(value), _position(value)
    if not is_own_class(type(value)) and not isinstance(value, nn.Module):
        return "object", type(value).__qualname__, id(value), _state(value)
    return "object", type(value).__qualname__, id(value)


def _look_inside(value: Any, protected: Collection[int]) -> tuple[bytes, ...]:
    return tuple(islice(content_digests(value, protected), CHUNKS_MAX))


def content_digests(
    value: Any, protected: Collection[int], count: int | None = None
) -> Iterator[bytes]:
    """Yield a digest of each chunk of a tensor, an array (64 KiB) or a container (as long a time).

    `protected`: as in `look_of`. `count`: of the first items of a container only. A container that
    changes its size between two digests raises RuntimeError, as its iterator does.
    """
    if isinstance(value, torch.Tensor):
        yield msgspec.msgpack.encode(look_of(value, protected)[2:])
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        width = max(1, CHUNK_BYTES // max(1, value.itemsize))
        for start in range(0, value.size, width):
            if not value.flags.writeable or isinstance(value, np.memmap):
                return
            memory: Any = np.ascontiguousarray(_flat(value)[start : start + width])
            yield xxhash.xxh3_64_digest(memory.view(np.uint8))
    else:
        items = value.items() if isinstance(value, dict) else value
        items = value.flat if isinstance(value, np.ndarray) else items
        yield from _digests_of(islice(items, count), protected)


def _flat(value: np.ndarray[Any, Any]) -> Any:
    """Return something whose slices are those of the elements, and no copy of them all."""
    return np.asarray(value).reshape(-1) if value.flags.c_contiguous else value.flat


def _digests_of(items: Iterator[Any], protected: Collection[int]) -> Iterator[bytes]:
    places, room = dict[int, int](), CHUNK_BYTES

    def readable(inner: Any) -> Any:
        """Return an encodable fingerprint of a value of a type that msgspec does not support."""
        nonlocal room
        if id(inner) in places or id(inner) in protected:
            return places.get(id(inner)), id(inner)
        places[id(inner)] = len(places)
        room -= _OBJECT_BYTES
        if isinstance(inner, np.ndarray) and not inner.dtype.hasobject:
            is_fixed = not inner.flags.writeable or isinstance(inner, np.memmap)
            if is_fixed or inner.nbytes > CONTENT_BYTES_MAX:
                return id(inner)
            room -= inner.nbytes
            memory: Any = np.ascontiguousarray(inner).view(np.uint8)
            return inner.shape, xxhash.xxh3_64_digest(memory)
        if isinstance(inner, torch.Tensor) and not isinstance(inner, nn.Parameter):
            return look_of(inner, protected)
        if is_own_class(type(inner)) and not isinstance(inner, nn.Module):
            return id(inner), getattr(inner, "__dict__", {}), dict(slot_values(inner))
        if isinstance(inner, deque):
            return list(inner)
        return id(inner) if not isinstance(inner, (complex, np.generic)) else repr(inner)

    encoder, digest = msgspec.msgpack.Encoder(enc_hook=readable), xxhash.xxh3_64()
    for first in items:
        # Plain items are small; others are encoded one by one, to stay near the size of a chunk.
        inner = first[-1] if type(first) is tuple and first else first  # of a dict: a value
        batch = [first, *islice(items, _PLAIN_ITEMS - 1)] if type(inner) in PLAIN else [first]
        try:
            data = encoder.encode(batch)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
            data = b""  # it cannot be read: a change of it stays unknown
        digest.update(data)
        room -= _ENCODED_BYTES * len(data) + _OBJECT_BYTES
        if room < 0:
            yield digest.digest()
            digest, room = xxhash.xxh3_64(), CHUNK_BYTES
    if room < CHUNK_BYTES:
        yield digest.digest()


def _state(value: Any) -> bytes | None:
    """Return the encoded state of an unprotected scheduler or GradScaler, else None."""
    if isinstance(value, (LRScheduler, torch.amp.GradScaler)):
        return written(value.state_dict())
    return None


def _has_memory(value: torch.Tensor) -> bool:
    return value.layout == torch.strided and value.device.type != "meta"


def _locals(value: types.GeneratorType[Any, Any, Any]) -> Any:
    frame = value.gi_frame
    if frame is None:
        return None
    return tuple(
        (name, written(inner) if isinstance(inner, PLAIN) else id(inner))
        for name, inner in frame.f_locals.items()
    )


def is_opaque(value: Any) -> bool:
    """Return whether `value` is an iterator whose position cannot be read."""
    return isinstance(value, _OPAQUE) or type(value).__module__ == "itertools"


def _is_library_iterator(value: Any) -> bool:
    return hasattr(type(value), "__next__") and not is_own_class(type(value))


def _position(value: Any) -> Any:
    counted = getattr(value, "_num_yielded", None)  # torch's loaders count
    hint: Callable[[], int] | None = getattr(value, "__length_hint__", None)
    try:
        return counted, hint() if hint is not None else None
    except TypeError:
        return counted, None


def slot_values(value: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    """Yield the attributes that a value keeps in `__slots__`."""
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for slot in [slots] if isinstance(slots, str) else slots:
            is_private = slot.startswith("__") and not slot.endswith("__")
            name = f"_{base.__name__.lstrip('_')}{slot}" if is_private else slot
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield ("attr", name), getattr(value, name)
