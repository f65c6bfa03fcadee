"""Fingerprints of values that cannot be encoded, and positions of iterators."""

from __future__ import annotations

import ctypes
import io
import mmap
import queue
import types
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterator
from configparser import RawConfigParser
from contextlib import suppress
from itertools import islice
from multiprocessing.queues import Queue as ProcessQueue
from multiprocessing.sharedctypes import Synchronized
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.quasirandom import SobolEngine

from outlast.worker.script.value_encoding import PLAIN, place_in_file, written
from outlast.worker.script.value_paths import is_own_class

if TYPE_CHECKING:
    from outlast.worker.state.protected_state import ProtectedState

CONTENT_BYTES_MAX = 64 << 20  # of one array in a container
CHUNK_BYTES = 1 << 16
CHUNKS_MAX = 1024  # of one container or array that are looked at at once
_PLAIN_ITEMS = 256  # that are encoded at once
# What takes as long as these bytes of an array: one object, and one byte of plain items.
_OBJECT_BYTES, _ENCODED_BYTES = 1024, 4
ITEMS_MAX = 256  # of one container that cannot be written down, to be visited one by one
_OPAQUE = (enumerate, zip, map, filter, types.AsyncGeneratorType, types.CoroutineType)
QUEUES = (queue.Queue, queue.SimpleQueue, ProcessQueue)  # what fills them is not seen
# Objects of libraries that hold their state in the attributes of the object.
_HOLDERS = (UserDict, UserList, ChainMap, RawConfigParser, SobolEngine)
# Modules of running digests: hashlib's, and xxhash.
_DIGESTS = ("_hashlib", "_md5", "_sha1", "_sha2", "_sha3", "_blake2", "xxhash")
_C_VALUES: tuple[type, ...] = (
    ctypes.Array,
    ctypes.Structure,
    ctypes.Union,
    type(ctypes.c_int()).__mro__[1],
)


def look_of(value: Any, protected: Collection[int]) -> Any:
    """Return a fingerprint of a value that cannot be encoded: equal while it seems unchanged.

    `protected`: ids of objects whose content may change.
    """
    if isinstance(value, torch.Tensor):
        return "tensor", id(value), value.data_ptr() if _has_memory(value) else 0, value._version  # noqa: SLF001 - torch's own counter of changes
    if isinstance(value, types.GeneratorType):
        return "generator", id(value), value.gi_frame and value.gi_frame.f_lasti, _locals(value)
    if isinstance(value, (list, dict, set, deque)):
        are_visited = (
            isinstance(value, (list, dict))
            and len(value) <= ITEMS_MAX
            and all(isinstance(key, (str, int)) for key in value if isinstance(value, dict))
        )
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
    is_of_script = is_own_class(type(value)) and not isinstance(value, _C_VALUES)
    if not is_of_script and not isinstance(value, nn.Module):
        return "object", type(value).__qualname__, id(value), _state(value, protected)
    return "object", type(value).__qualname__, id(value)


def _look_inside(value: Any, protected: Collection[int]) -> tuple[bytes, ...]:
    with suppress(RuntimeError):  # a thread changes its size meanwhile
        return tuple(islice(content_digests(value, protected), CHUNKS_MAX))
    return ()


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


def _state(value: Any, protected: Collection[int]) -> bytes | None:
    """Return the state of an unprotected scheduler, GradScaler or holder of state, else None."""
    if isinstance(value, (LRScheduler, torch.amp.GradScaler)):
        return written(value.state_dict())
    if isinstance(value, (array, bytearray)):
        return xxhash.xxh3_64_digest(value)
    if isinstance(value, np.random.SeedSequence):
        return repr(value.state).encode()
    if isinstance(value, Synchronized):
        return repr(value.get_obj().value).encode()  # its lock may never be free
    if type(value).__module__ in _DIGESTS and hasattr(value, "digest"):
        return value.digest(16) if value.digest_size == 0 else value.digest()  # 0: SHAKE
    if isinstance(value, _C_VALUES):
        return xxhash.xxh3_64_digest(bytes(value))
    if isinstance(value, mmap.mmap):
        return None if value.closed else _state_of_map(value)
    is_holder = isinstance(value, _HOLDERS)
    return b"".join(_look_inside(list(vars(value).values()), protected)) if is_holder else None


def _state_of_map(value: mmap.mmap) -> bytes:
    """Return the position in a memory map, and a digest of its bytes if they can be written to."""
    position = str(value.tell()).encode()
    with memoryview(value) as memory:
        is_fixed = memory.readonly or memory.nbytes > CONTENT_BYTES_MAX
        return position if is_fixed else position + xxhash.xxh3_64_digest(memory)


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
    if isinstance(value, _OPAQUE) or type(value).__module__ == "itertools":
        return True
    if isinstance(value, io.IOBase):
        return not value.closed and not value.writable() and place_in_file(value) is None
    is_written = any(hasattr(type(value), name) for name in ("write", "execute"))
    is_generator = isinstance(value, types.GeneratorType)
    is_other = _is_library_iterator(value) and not is_written and not is_generator
    return is_other and _position(value) == (None, None)


def _is_library_iterator(value: Any) -> bool:
    return hasattr(type(value), "__next__") and not is_own_class(type(value))


def _position(value: Any) -> Any:
    if isinstance(value, (io.BytesIO, io.StringIO)):
        return None if value.closed else value.tell(), None
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


def scripted_values(module: nn.Module) -> Iterator[tuple[tuple[str, Any], Any]]:
    """Yield the attributes that a module of TorchScript keeps in C++; nothing for other modules."""
    kind = getattr(module, "_concrete_type", None)
    if not isinstance(module, torch.jit.ScriptModule) or kind is None:
        return
    for name in sorted(kind.get_attributes()):
        if not name.startswith("_") and name != "training":
            value = getattr(module, name)
            if not isinstance(value, torch.Tensor):
                yield ("attr", name), value


def identities(protected: ProtectedState) -> set[int]:
    """Return the ids of all protected objects and of their parts."""
    found = {id(part) for part in (*protected.tree.parts, *protected.tree.parameters())}
    found |= {id(buffer) for buffer in protected.tree.buffers().values()}
    todo: list[Any] = [
        *protected.modules.values(),
        *protected.optimizers.values(),
        *protected.objects.values(),
        *protected.generators.values(),
        *(loader for loader in protected.loaders if loader is not None),
        *protected.own.values(),
    ]
    while todo:
        value = todo.pop()
        found.add(id(value))
        if isinstance(value, (dict, list)):
            inner = value.values() if isinstance(value, dict) else value
            todo += [each for each in inner if isinstance(each, (dict, list))]
    return found
