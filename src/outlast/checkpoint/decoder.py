"""Nodes to values: the mirror of encoder.py."""

from __future__ import annotations

import struct
from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import PosixPath, PurePosixPath
from typing import Any

import numpy as np
import torch

from outlast.checkpoint.schema import (
    COMPLEX,
    DEPTH_MAX,
    FACTORIES,
    FLOAT,
    INT,
    SIZE,
    TensorSpec,
    unseal,
)
from outlast.errors import CorruptionError


class Reader:
    """One body being read. `tensor` is called once for each tensor node, in order."""

    def __init__(self, body: memoryview, tensor: Callable[[TensorSpec], torch.Tensor]) -> None:
        self.body = body
        self.at = 0
        self.tensor = tensor
        self.depth = 0

    def node(self) -> Any:
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
        end = self.at + size
        if end > len(self.body):
            raise ValueError(f"cut short at byte {self.at}")
        piece = self.body[self.at : end]
        self.at = end
        return piece

    def size(self) -> int:
        (size,) = SIZE.unpack(self.take(SIZE.size))
        return size

    def raw(self) -> memoryview:
        return self.take(self.size())

    def text(self) -> str:
        return str(self.raw(), "utf-8", "surrogatepass")

    def numbers(self, code: str) -> array[Any]:
        found = array(code)
        found.frombytes(self.raw())
        return found

    def pairs(self) -> list[tuple[Any, Any]]:
        return [(self.node(), self.node()) for _ in range(self.size())]

    def items(self) -> list[Any]:
        return [self.node() for _ in range(self.size())]

    def packed(self) -> array[Any]:
        return self.numbers(self.take(1).tobytes().decode("ascii"))


def read(schema: bytes | memoryview, tensor: Callable[[TensorSpec], torch.Tensor]) -> Any:
    """The value of `schema`. Raises CorruptionError when it is damaged or of another version."""
    body = unseal(schema)
    reader = Reader(body, tensor)
    try:
        value = reader.node()
    except (ValueError, TypeError, KeyError, struct.error, RuntimeError, OverflowError) as error:
        raise CorruptionError(f"a schema is not well formed: {error}; nothing was read") from error
    if reader.at != len(body):
        raise CorruptionError(f"a schema has {len(body) - reader.at} bytes too many")
    return value


def _int(reader: Reader) -> int:
    (value,) = INT.unpack(reader.take(INT.size))
    return value


def _float(reader: Reader) -> float:
    (value,) = FLOAT.unpack(reader.take(FLOAT.size))
    return value


def _ordered(reader: Reader) -> OrderedDict[Any, Any]:
    value = OrderedDict(reader.pairs())
    vars(value).update(reader.node())
    return value


def _counter(reader: Reader) -> Counter[Any]:
    value: Counter[Any] = Counter()
    for key, count in reader.pairs():
        value[key] = count
    return value


def _defaultdict(reader: Reader) -> defaultdict[Any, Any]:
    pairs = reader.pairs()
    name = reader.node()
    return defaultdict(FACTORIES[name] if name else None, pairs)


def _tensor(reader: Reader) -> torch.Tensor:
    dtype = _torch_dtype(reader.text())
    device = reader.text()
    return reader.tensor(TensorSpec(tuple(reader.numbers("q")), dtype, device))


def _dtype(reader: Reader) -> torch.dtype:
    return _torch_dtype(reader.text())


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return dtype


def _array(reader: Reader) -> np.ndarray[Any, Any]:
    dtype = np.lib.format.descr_to_dtype(reader.node())
    shape = tuple(reader.numbers("q"))
    return np.ndarray(shape, dtype, buffer=reader.raw()).copy()


_READERS: dict[bytes, Callable[[Reader], Any]] = {
    b"N": lambda _: None,
    b"+": lambda _: True,
    b"-": lambda _: False,
    b"i": _int,
    b"I": lambda reader: int.from_bytes(reader.raw(), "little", signed=True),
    b"f": _float,
    b"c": lambda reader: complex(*COMPLEX.unpack(reader.take(COMPLEX.size))),
    b"s": Reader.text,
    b"b": lambda reader: reader.raw().tobytes(),
    b"l": Reader.items,
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
