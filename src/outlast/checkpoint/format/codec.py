"""Codec of values without pickle: numbers, containers, tensors, generator states.

`encode` and `decode` use one self-contained blob: `OLB1 | length of schema | schema | tensors |
xxh3_128`, little endian. `flatten` and `unflatten` separate the tensors, for callers that stream
them. Supported: None, bool, int, float (each bit), complex, str, bytes, list, tuple, dict,
OrderedDict, Counter, defaultdict of a builtin type, set, frozenset, strided tensors of every dtype
(values and device type; not strides, sharing or requires_grad), torch.Size, dtype and device, NumPy
arrays and scalars without objects, pathlib paths. Anything else is a CodecError with its path.
"""

from __future__ import annotations

import struct
from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from pathlib import PosixPath, PurePosixPath
from typing import Any

import numpy as np
import torch
import xxhash

from outlast.checkpoint.format import value_encoder
from outlast.checkpoint.format.value_encoder import (
    BLOB_MAGIC,
    COMPLEX,
    DEPTH_MAX,
    DIGEST_BYTES,
    FACTORIES,
    FLOAT,
    INT,
    SIZE,
    Encoded,
    TensorSpec,
    seal,
    unseal,
)
from outlast.errors import CorruptionError


class NodeReader:
    """Reader of one body. `tensor` is called once for each tensor node, in order."""

    def __init__(self, body: memoryview, tensor: Callable[[TensorSpec], torch.Tensor]) -> None:
        self.body = body
        self.at = 0
        self.tensor = tensor
        self.depth = 0

    def node(self) -> Any:
        """Return the value of the next node.

        Raises ValueError for an unknown tag or too deep nesting.
        """
        tag = self.take(1).tobytes()
        read = _READERS.get(tag)
        if read is None:
            raise ValueError(f"unknown node {tag!r} at byte {self.at - 1}")
        self.depth += 1
        if self.depth > 2 * DEPTH_MAX + 2:  # keys may be as deep as values
            raise ValueError("nested too deep")
        value = read(self)
        self.depth -= 1
        return value

    def take(self, size: int) -> memoryview:
        """Return the next `size` bytes. Raises ValueError where the body ends before."""
        end = self.at + size
        if end > len(self.body):
            raise ValueError(f"cut short at byte {self.at}")
        piece = self.body[self.at : end]
        self.at = end
        return piece

    def size(self) -> int:
        """Read a size (64 bits)."""
        (size,) = SIZE.unpack(self.take(SIZE.size))
        return size

    def raw(self) -> memoryview:
        """Read bytes with their size before them."""
        return self.take(self.size())

    def text(self) -> str:
        """Read a string."""
        return str(self.raw(), "utf-8", "surrogatepass")

    def numbers(self, code: str) -> array[Any]:
        """Read an array of numbers of the type `code`."""
        values = array(code)
        values.frombytes(self.raw())
        return values

    def pairs(self) -> list[tuple[Any, Any]]:
        """Read the pairs of a mapping."""
        return [(self.node(), self.node()) for _ in range(self.size())]

    def items(self) -> list[Any]:
        """Read the items of a container."""
        return [self.node() for _ in range(self.size())]

    def packed(self) -> array[Any]:
        """Read an array with its type code before it."""
        return self.numbers(self.take(1).tobytes().decode("ascii"))


def read_node(schema: bytes | memoryview, tensor: Callable[[TensorSpec], torch.Tensor]) -> Any:
    """Return the value of `schema`.

    Raises CorruptionError when it is damaged or of another version.
    """
    body = unseal(schema)
    reader = NodeReader(body, tensor)
    try:
        value = reader.node()
    except (ValueError, TypeError, KeyError, struct.error, RuntimeError, OverflowError) as error:
        raise CorruptionError(f"a schema is not well formed: {error}; nothing was read") from error
    if reader.at != len(body):
        raise CorruptionError(f"a schema has {len(body) - reader.at} bytes too many")
    return value


def _int(reader: NodeReader) -> int:
    (value,) = INT.unpack(reader.take(INT.size))
    return value


def _float(reader: NodeReader) -> float:
    (value,) = FLOAT.unpack(reader.take(FLOAT.size))
    return value


def _ordered(reader: NodeReader) -> OrderedDict[Any, Any]:
    value = OrderedDict(reader.pairs())
    vars(value).update(reader.node())
    return value


def _counter(reader: NodeReader) -> Counter[Any]:
    value: Counter[Any] = Counter()
    for key, count in reader.pairs():
        value[key] = count
    return value


def _defaultdict(reader: NodeReader) -> defaultdict[Any, Any]:
    pairs = reader.pairs()
    name = reader.node()
    return defaultdict(FACTORIES[name] if name else None, pairs)


def _tensor(reader: NodeReader) -> torch.Tensor:
    dtype = _torch_dtype(reader.text())
    device = reader.text()
    return reader.tensor(TensorSpec(tuple(reader.numbers("q")), dtype, device))


def _dtype(reader: NodeReader) -> torch.dtype:
    return _torch_dtype(reader.text())


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return dtype


def _array(reader: NodeReader) -> np.ndarray[Any, Any]:
    dtype = np.lib.format.descr_to_dtype(reader.node())
    shape = tuple(reader.numbers("q"))
    return np.ndarray(shape, dtype, buffer=reader.raw()).copy()


_READERS: dict[bytes, Callable[[NodeReader], Any]] = {
    b"N": lambda _: None,
    b"+": lambda _: True,
    b"-": lambda _: False,
    b"i": _int,
    b"I": lambda reader: int.from_bytes(reader.raw(), "little", signed=True),
    b"f": _float,
    b"c": lambda reader: complex(*COMPLEX.unpack(reader.take(COMPLEX.size))),
    b"s": NodeReader.text,
    b"b": lambda reader: reader.raw().tobytes(),
    b"l": NodeReader.items,
    b"t": lambda reader: tuple(reader.items()),
    b"L": lambda reader: reader.packed().tolist(),
    b"U": lambda reader: tuple(reader.packed()),
    b"T": _tensor,
    b"e": lambda reader: set(reader.items()),
    b"z": lambda reader: frozenset(reader.items()),
    b"d": lambda reader: dict(reader.pairs()),
    b"o": _ordered,
    b"n": _counter,
    b"D": _defaultdict,
    b"S": lambda reader: torch.Size(reader.numbers("q")),
    b"y": _dtype,
    b"v": lambda reader: torch.device(reader.text()),
    b"p": lambda reader: PosixPath(reader.text()),
    b"P": lambda reader: PurePosixPath(reader.text()),
    b"a": _array,
    b"G": lambda reader: _array(reader)[()],
}


__all__ = [
    "Encoded",
    "TensorSpec",
    "decode",
    "encode",
    "encode_node",
    "flatten",
    "layout",
    "raw",
    "unflatten",
]


def flatten(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return the schema of `value`, and its tensors: detached, by reference where contiguous.

    Raises CodecError naming the place ("scheduler.lr_lambdas[0] is a function ...").
    """
    body, tensors = _written(value)
    return seal(body), tensors


def _written(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    writer = value_encoder.NodeWriter()
    writer.value(value)
    groups = (each.tensors if isinstance(each, Encoded) else (each,) for each in writer.tensors)
    return b"".join(writer.parts), [tensor for group in groups for tensor in group]


def encode_node(value: Any) -> Encoded:
    """Return `value` as a node that takes its place in other values: a value that stays the same is
    encoded once. Raises CodecError as `flatten` does."""
    body, tensors = _written(value)
    return Encoded(body, tuple(tensors), b"".join(map(raw, tensors)))


def unflatten(schema: bytes | memoryview, tensors: Iterable[torch.Tensor]) -> Any:
    """Return the value of `schema` with `tensors` in their places, by reference.

    Raises CorruptionError when the schema is damaged or does not fit the tensors.
    """
    rest = iter(tensors)

    def fitting(spec: TensorSpec) -> torch.Tensor:
        tensor = next(rest, None)
        if tensor is None:
            raise CorruptionError("a schema lists more tensors than there are")
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise CorruptionError(
                f"a tensor of {tuple(tensor.shape)} {tensor.dtype} is given where the schema has"
                f" {spec.shape} {spec.dtype}; nothing was taken over"
            )
        return tensor

    value = read_node(schema, fitting)
    if next(rest, None) is not None:
        raise CorruptionError("there are more tensors than the schema lists")
    return value


def layout(schema: bytes | memoryview) -> list[TensorSpec]:
    """Return the specs of the tensors of `schema`, in order, for allocation.

    Raises CorruptionError when the schema is damaged.
    """
    specs: list[TensorSpec] = []
    nothing = torch.empty(0, device="cpu")

    def collect(spec: TensorSpec) -> torch.Tensor:
        specs.append(spec)
        return nothing

    read_node(schema, collect)
    return specs


def raw(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor.

    On the CPU these are its own memory (writing there writes the tensor), else a copy.
    """
    flat = tensor.detach().reshape(-1)
    if not flat.numel():  # it may have any strides, which a view of its bytes must not have
        flat = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return flat.view(torch.uint8).cpu().numpy().data


def encode(value: Any) -> bytes:
    """Return `value` as one blob. Raises CodecError as `flatten` does."""
    writer = value_encoder.NodeWriter()
    writer.value(value)
    schema = seal(b"".join(writer.parts))
    raws = (each.raw if isinstance(each, Encoded) else raw(each) for each in writer.tensors)
    body = b"".join((BLOB_MAGIC, SIZE.pack(len(schema)), schema, *raws))
    return body + xxhash.xxh3_128_digest(body)


def decode(blob: bytes | memoryview) -> Any:
    """Return the value of a blob.

    Tensors own their memory, and are on this process's device of the type that they were on (on the
    CPU where it has none). Raises CorruptionError when any bit is wrong.
    """
    view = memoryview(blob)
    body, end = view[:-DIGEST_BYTES], len(view) - DIGEST_BYTES
    start = len(BLOB_MAGIC) + SIZE.size
    if end < start:
        raise CorruptionError(f"a value of {len(view)} bytes is cut short; nothing was read")
    magic = bytes(body[: len(BLOB_MAGIC)])
    if magic != BLOB_MAGIC:
        raise CorruptionError(
            f"not a value of version 1 (starts with {magic!r}): it is damaged or was written by"
            " another version of Outlast; nothing was read"
        )
    if xxhash.xxh3_128_digest(body) != view[end:]:
        raise CorruptionError("a value's bytes do not match their digest; nothing was read")
    (schema_bytes,) = SIZE.unpack_from(body, len(BLOB_MAGIC))
    at = start + schema_bytes

    def copied(spec: TensorSpec) -> torch.Tensor:
        nonlocal at
        tensor = spec.allocate()
        piece = body[at : at + spec.size_bytes]
        raw(tensor)[:] = piece
        at += len(piece)
        return tensor.to(spec.home())

    value = read_node(body[start:at], copied)
    if at != end:
        raise CorruptionError(f"a value has {end - at} bytes too many; nothing was taken over")
    return value
