"""Encoding of values without pickle: the schema's frame, tensor specs, a node for each type.

A schema is `OLS1 | xxh3_64(body) | body`, little endian. A body is one node; a node is a tag byte
and its payload. Tensors are not inside: a tensor node holds dtype, device type and shape, and the
tensors travel beside the schema, in the order of their nodes.
"""

from __future__ import annotations

import math
import reprlib
import struct
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache
from pathlib import PosixPath, PurePath, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from outlast.checkpoint.format.manifests import ITEM_BYTES
from outlast.errors import CodecError, CorruptionError

MAGIC = b"OLS1"
BLOB_MAGIC = b"OLB1"
DIGEST_BYTES = 16
DEPTH_MAX = 100
STAGED_BYTES_MIN = 1 << 20
_HEAD = struct.Struct("<4sQ")
SIZE = struct.Struct("<Q")
INT = struct.Struct("<q")
FLOAT = struct.Struct("<d")
COMPLEX = struct.Struct("<dd")

FACTORIES: dict[str, type] = {
    kind.__name__: kind
    for kind in (int, float, complex, bool, str, bytes, list, tuple, dict, set, frozenset)
}

assert sys.byteorder == "little", "values are stored as this machine's bytes: little endian only"


class TensorSpec(NamedTuple):
    """Shape, dtype and device type ("cpu", "cuda") of an encoded tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @property
    def size_bytes(self) -> int:
        """Return the size of its elements in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def allocate(self) -> torch.Tensor:
        """Return memory for it, on the CPU whatever the script's default device is."""
        return torch.empty(self.shape, dtype=self.dtype, device="cpu")

    def home(self) -> torch.device:
        """Return this process's device of that type, else the CPU."""
        if self.device == "cpu":
            return torch.device("cpu")
        own = torch.accelerator.current_accelerator(check_available=True)
        return torch.device(self.device if own is not None and own.type == self.device else "cpu")

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` on the device where it waits for its owner.

        Large tensors wait on the CPU, or they would take the device's memory twice. Small ones go
        to their device: owners of counters use them without a copy.
        """
        return tensor if self.size_bytes > STAGED_BYTES_MIN else tensor.to(self.home())


def seal(body: bytes) -> bytes:
    """Return `body` with its header."""
    return _HEAD.pack(MAGIC, xxhash.xxh3_64_intdigest(body)) + body


def unseal(schema: bytes | memoryview) -> memoryview:
    """Return the body. Raises CorruptionError when it is damaged or of another version."""
    if len(schema) < _HEAD.size:
        raise CorruptionError(f"a schema of {len(schema)} bytes is cut short; nothing was read")
    magic, digest = _HEAD.unpack_from(schema)
    if magic != MAGIC:
        raise CorruptionError(
            f"not a schema of version 1 (starts with {magic!r}): it is damaged or was written by"
            " another version of Outlast; nothing was read"
        )
    body = memoryview(schema)[_HEAD.size :]
    if xxhash.xxh3_64_intdigest(body) != digest:
        raise CorruptionError("a schema's bytes do not match its digest; nothing was read")
    return body


_SHORT_MAX = 64  # characters of a string whose bytes are kept: keys occur in every step
_DEEP = 6  # levels from which on cycles are looked for
_PACKED_MIN = 8  # shorter sequences of one number type are written item by item


_REBUILT = "leave it out of the protected state, or keep what rebuilds it"
_SHARDED = "keep sharded tensors as parameters of a protected module that is sharded alike"


class _Refused(Exception):  # noqa: N818 - collects the path on its way up, never leaves this module
    def __init__(self, what: str, instead: str = _REBUILT) -> None:
        super().__init__(what)
        self.what, self.instead = what, instead
        self.path: list[str] = []
        self.steps: int | None = None  # of the path, from its beginning; None: all


class Encoded(NamedTuple):
    """Node that is written already, to be placed in other values. `raw`: the bytes of `tensors`."""

    body: bytes
    tensors: tuple[torch.Tensor, ...]
    raw: bytes


class NodeWriter:
    """Writer of one value: `parts` is the body so far, `tensors` its tensors."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.tensors: list[torch.Tensor | Encoded] = []
        self.inside: list[Any] = []  # the containers that we are in

    def value(self, value: Any) -> None:
        """Write a value. Raises CodecError naming the path of the part that cannot be written."""
        try:
            self.node(value)
        except _Refused as refused:
            steps = refused.path[::-1][: refused.steps]
            place = "".join(steps).removeprefix(".") or "the value"
            raise CodecError(
                f"{place} {refused.what}, which cannot be kept without pickle; nothing was"
                f" written; {refused.instead}"
            ) from None

    def node(self, value: Any) -> None:
        """Write a node, of any supported type."""
        _WRITERS.get(type(value), _scalar)(self, value)

    def enter(self, value: Any) -> None:
        """Enter a container; refuse cycles and too deep nesting."""
        depth = len(self.inside)
        if depth >= _DEEP and (depth >= DEPTH_MAX or any(each is value for each in self.inside)):
            raise self._refused([*self.inside, value])
        self.inside.append(value)

    def _refused(self, inside: list[Any]) -> _Refused:
        """Return the refusal of a cycle, or of the depth. Shallow values are not looked at: each
        call of `id` is an audit event, and scripts that work on files have a hook."""
        around = set[int]()
        for depth, each in enumerate(inside):
            if id(each) in around:
                refused = _Refused("contains itself")
                refused.steps = depth
                return refused
            around.add(id(each))
        return _Refused(f"is nested deeper than {DEPTH_MAX} levels")


@lru_cache(maxsize=4096)
def _short_text(text: str) -> bytes:
    return b"s" + _text(text)


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return SIZE.pack(len(raw)) + raw


def _numbers(code: str, numbers: Iterable[Any]) -> bytes:
    raw = array(code, numbers).tobytes()
    return SIZE.pack(len(raw)) + raw


def _is(value: Any) -> str:
    if callable(value) and hasattr(value, "__qualname__"):
        return f"is a {type(value).__name__} ({value.__module__}.{value.__qualname__})"
    return f"is a {type(value).__module__}.{type(value).__qualname__}"


def _none(writer: NodeWriter, _value: None) -> None:
    writer.parts.append(b"N")


def _bool(writer: NodeWriter, value: bool) -> None:
    writer.parts.append(b"+" if value else b"-")


def _int(writer: NodeWriter, value: int) -> None:
    if -(1 << 63) <= value < 1 << 63:
        writer.parts.append(b"i" + INT.pack(value))
    else:
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        writer.parts.append(b"I" + SIZE.pack(len(raw)) + raw)


def _float(writer: NodeWriter, value: float) -> None:
    writer.parts.append(b"f" + FLOAT.pack(value))


def _complex(writer: NodeWriter, value: complex) -> None:
    writer.parts.append(b"c" + COMPLEX.pack(value.real, value.imag))


def _str(writer: NodeWriter, value: str) -> None:
    is_short = len(value) <= _SHORT_MAX
    writer.parts.append(_short_text(value) if is_short else b"s" + _text(value))


def _bytes(writer: NodeWriter, value: bytes) -> None:
    writer.parts.append(b"b" + SIZE.pack(len(value)))
    writer.parts.append(value)


def _items(
    writer: NodeWriter, value: list[Any] | tuple[Any, ...], tag: bytes, packed_tag: bytes
) -> None:
    if len(value) >= _PACKED_MIN and (packed := _packed(value)) is not None:
        writer.parts.append(packed_tag + packed)
        return
    writer.enter(value)
    writer.parts.append(tag + SIZE.pack(len(value)))
    for index, item in enumerate(value):
        try:
            _WRITERS.get(type(item), _scalar)(writer, item)
        except _Refused as refused:
            refused.path.append(f"[{index}]")
            raise
    writer.inside.pop()


def _packed(items: list[Any] | tuple[Any, ...]) -> bytes | None:
    """Encode integers or floats of one width as one array; None for other items."""
    kinds = set(map(type, items))
    codes = ("I", "q") if kinds == {int} else ("d",) if kinds == {float} else ()
    for code in codes:
        try:
            return code.encode() + _numbers(code, items)
        except OverflowError:  # one of them needs more bits
            continue
    return None


def _set(writer: NodeWriter, value: set[Any] | frozenset[Any]) -> None:
    raws = sorted(_hashable(item) for item in value)  # the same set always gives the same bytes
    writer.parts.append((b"e" if type(value) is set else b"z") + SIZE.pack(len(raws)))
    writer.parts += raws


def _hashable(item: Hashable) -> bytes:
    inner = NodeWriter()
    inner.node(item)
    if inner.tensors:
        raise _Refused("has a tensor as a key or in a set")
    return b"".join(inner.parts)


def _ordered(writer: NodeWriter, value: OrderedDict[Any, Any]) -> None:
    _pairs(writer, value, b"o")
    writer.node(vars(value))  # a module's state_dict() keeps its versions in `_metadata`


def _defaultdict(writer: NodeWriter, value: defaultdict[Any, Any]) -> None:
    factory = value.default_factory
    name = getattr(factory, "__name__", "")
    if factory is not None and FACTORIES.get(name) is not factory:
        raise _Refused(f"is a defaultdict of {factory!r}")
    _pairs(writer, value, b"D")
    _str(writer, name)


def _pairs(writer: NodeWriter, value: dict[Any, Any], tag: bytes) -> None:
    writer.enter(value)
    writer.parts.append(tag + SIZE.pack(len(value)))
    for key, item in value.items():
        try:
            if type(key) is str:
                _str(writer, key)
            else:
                writer.parts.append(_hashable(key))
            _WRITERS.get(type(item), _scalar)(writer, item)
        except _Refused as refused:
            plain = type(key) is str and key.isidentifier()
            refused.path.append(f".{key}" if plain else f"[{reprlib.repr(key)}]")
            raise
    writer.inside.pop()


def _tensor(writer: NodeWriter, value: torch.Tensor) -> None:
    nested = value.is_nested
    if nested or value.layout is not torch.strided or value.is_quantized or value.is_meta:
        kind = "nested" if nested else f"{value.layout}, {value.dtype}, {value.device}"
        raise _Refused(f"is a tensor that is not plain memory ({kind})")
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    writer.parts.append(_tensor_head(plain.dtype, plain.device.type, tuple(plain.shape)))
    writer.tensors.append(plain)


@lru_cache(maxsize=4096)
def _tensor_head(dtype: torch.dtype, device: str, shape: tuple[int, ...]) -> bytes:
    name = str(dtype).removeprefix("torch.")
    return b"T" + _text(name) + _text(device) + _numbers("q", shape)


def _encoded(writer: NodeWriter, value: Encoded) -> None:
    writer.parts.append(value.body)
    writer.tensors += (value,) if value.tensors else ()


def _size(writer: NodeWriter, value: torch.Size) -> None:
    writer.parts.append(b"S" + _numbers("q", value))


def _dtype(writer: NodeWriter, value: torch.dtype) -> None:
    writer.parts.append(b"y" + _text(str(value).removeprefix("torch.")))


def _device(writer: NodeWriter, value: torch.device) -> None:
    writer.parts.append(b"v" + _text(str(value)))


def _path(writer: NodeWriter, value: PurePath) -> None:
    writer.parts.append((b"p" if isinstance(value, PosixPath) else b"P") + _text(str(value)))


def _ndarray(writer: NodeWriter, value: np.ndarray[Any, Any]) -> None:
    _array(writer, value, b"a")


def _scalar(writer: NodeWriter, value: Any) -> None:
    if not isinstance(value, np.generic):
        is_sharded = hasattr(type(value), "to_local")  # a DTensor, whose import takes a second
        raise _Refused(_is(value), _SHARDED if is_sharded else _REBUILT)
    _array(writer, np.asarray(value), b"G")


def _array(writer: NodeWriter, value: np.ndarray[Any, Any], tag: bytes) -> None:
    raw = value.tobytes()
    writer.parts.append(tag + _dtype_head(value.dtype) + _numbers("q", value.shape))
    writer.parts.append(SIZE.pack(len(raw)))
    writer.parts.append(raw)


@lru_cache(maxsize=256)
def _dtype_head(dtype: np.dtype[Any]) -> bytes:
    descr = np.lib.format.dtype_to_descr(dtype)
    if dtype.hasobject or np.lib.format.descr_to_dtype(descr) != dtype:
        raise _Refused(f"is of NumPy dtype {dtype}")
    writer = NodeWriter()
    writer.node(descr)
    return b"".join(writer.parts)


_WRITERS: dict[type, Callable[[NodeWriter, Any], None]] = {
    type(None): _none,
    bool: _bool,
    int: _int,
    float: _float,
    complex: _complex,
    str: _str,
    bytes: _bytes,
    list: lambda writer, value: _items(writer, value, b"l", b"L"),
    tuple: lambda writer, value: _items(writer, value, b"t", b"U"),
    set: _set,
    frozenset: _set,
    dict: lambda writer, value: _pairs(writer, value, b"d"),
    OrderedDict: _ordered,
    Counter: lambda writer, value: _pairs(writer, value, b"n"),
    defaultdict: _defaultdict,
    torch.Tensor: _tensor,
    torch.nn.Parameter: _tensor,
    torch.Size: _size,
    torch.dtype: _dtype,
    torch.device: _device,
    np.ndarray: _ndarray,
    PosixPath: _path,
    PurePosixPath: _path,
    Encoded: _encoded,
}


def write_as(kind: type, plain: Callable[[Any], Any]) -> None:
    """Write values of a type as what `plain` returns for them, which a reader gets."""
    _WRITERS[kind] = lambda writer, value: writer.node(plain(value))


DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)
}
