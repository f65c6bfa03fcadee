"""Files of torch.save read as data: a zip of one pickle and tensor storages.

The zip's checksums, which torch writes and never verifies, are checked.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from outlast import pickle_reader
from outlast.checkpoint.format.value_encoder import DTYPES
from outlast.checkpoint.interop.foreign_layouts import sizes_of
from outlast.errors import CodecError, CorruptionError
from outlast.pickle_reader import Builder, PickleGlobal

PART_BYTES = 16 << 20
_PICKLE_BYTES_MAX = 64 << 20
_OPCODES_MAX = 4_000_000  # each may make an object of 200 bytes
_VALUES_MAX = 1_000_000
_DEPTH_MAX = 100
_OBJECT_BYTES_MAX = 256 << 20  # of an object, in which one tensor or text may be named many times
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, LookupError, RuntimeError)
_STORAGES = {
    "BFloat16": "bfloat16",
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "Int": "int32",
    "Long": "int64",
    "Short": "int16",
}


class TorchStorage(NamedTuple):
    """A storage in the same zip. `dtype`: "" for one of bytes."""

    dtype: str
    key: str


class StoredTensor(NamedTuple):
    """A tensor over a storage in the same zip; offset and strides count elements."""

    storage: TorchStorage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Return the size of its elements in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class TorchSaveFile:
    """One object that torch.save wrote, its tensors as StoredTensor."""

    def __init__(self, archive: zipfile.ZipFile, where: str) -> None:
        """Read the pickle.

        Raises CodecError where it is more than data, CorruptionError where it is damaged.
        """
        self._archive = archive
        self._where = where
        self._limit_bytes = _OBJECT_BYTES_MAX
        self.object_bytes = 0  # size of the object made by `plain`
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CorruptionError(f"{where}: {len(pickles)} pickles where torch.save writes one")
        self._prefix = pickles[0].removesuffix("data.pkl")
        order = f"{self._prefix}byteorder"
        if order in archive.namelist() and self._whole(order) != b"little":
            raise CodecError(f"{where}: written on a big-endian machine, which Outlast cannot read")
        self.value = pickle_reader.read_pickle(
            self._whole(pickles[0]), _KNOWN, where, _storage, _OPCODES_MAX
        )

    def _entry(self, name: str) -> zipfile.ZipInfo:
        entry = self._archive.getinfo(name)
        if entry.compress_type != zipfile.ZIP_STORED:
            raise CodecError(f"{self._where}: {name} is compressed, as torch.save never does")
        return entry

    def _whole(self, name: str) -> bytes:
        entry = self._entry(name)
        if entry.file_size > _PICKLE_BYTES_MAX:
            raise CorruptionError(f"{self._where}: {name} has {entry.file_size} bytes")
        return self._archive.read(entry)

    def parts(self, tensor: StoredTensor) -> Iterator[bytes | memoryview]:
        """Yield the bytes of a tensor in C order.

        The checksum of its storage is verified after the last part was taken. Raises
        CorruptionError where the bytes are damaged, or fewer than the tensor needs.
        """
        itemsize = DTYPES[tensor.dtype].itemsize
        entry = self._entry(f"{self._prefix}data/{tensor.storage.key}")
        first = tensor.offset * itemsize
        contiguous = _contiguous(tensor.shape, tensor.stride)
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=True))
        needed = span * itemsize if tensor.size_bytes else 0
        if (
            min((tensor.offset, *tensor.shape, *tensor.stride)) < 0
            or needed < tensor.size_bytes  # an expanded tensor might be of any size
            or first + needed > entry.file_size
        ):
            raise CorruptionError(f"{self._where}: a tensor lies outside of its storage")
        with self._archive.open(entry) as file:
            if contiguous:
                yield from _range(file, first, tensor.size_bytes)
            else:
                elements = np.frombuffer(b"".join(_range(file, first, needed)), f"V{itemsize}")
                strides = tuple(n * itemsize for n in tensor.stride)
                view = np.lib.stride_tricks.as_strided(
                    elements, tensor.shape, strides, writeable=False
                )
                yield np.ascontiguousarray(view).reshape(-1).view(np.uint8).data
            while file.read(PART_BYTES):  # the checksum is looked at behind the last byte
                pass

    def plain(self, limit_bytes: int = _OBJECT_BYTES_MAX) -> Any:
        """Return the object as plain values and torch tensors.

        Raises CodecError for other objects, or more bytes than `limit_bytes` or 256 MiB.
        """
        self._limit_bytes = min(limit_bytes, _OBJECT_BYTES_MAX)
        budget = iter(range(_VALUES_MAX))
        return self._plain(self.value, budget, _DEPTH_MAX)

    def _plain(self, value: Any, budget: Iterator[int], depth: int) -> Any:
        if depth == 0 or next(budget, None) is None:
            raise CodecError(f"{self._where}: its object is too deep or too large for plain values")
        if isinstance(value, StoredTensor):
            return self._tensor(value)
        if isinstance(value, str | bytes):
            self._count(len(value))
        elif isinstance(value, int):
            self._count(value.bit_length() // 8)
        if isinstance(value, PickleGlobal):
            return _constant(value, self._where)
        if isinstance(value, dict):
            items = {
                self._plain(key, budget, depth - 1): self._plain(each, budget, depth - 1)
                for key, each in value.items()
            }
            return OrderedDict(items) if isinstance(value, OrderedDict) else items
        if isinstance(value, torch.Size):
            return value
        if isinstance(value, list | tuple | set | frozenset):
            return type(value)(self._plain(each, budget, depth - 1) for each in value)
        return value

    def _count(self, size_bytes: int) -> None:
        self.object_bytes += size_bytes
        if self.object_bytes > self._limit_bytes:
            raise CodecError(f"{self._where}: its object holds more bytes than a value should")

    def _tensor(self, stored: StoredTensor) -> torch.Tensor:
        self._count(stored.size_bytes)
        memory = bytearray().join(self.parts(stored))
        if not memory:
            return torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="cpu")
        return torch.frombuffer(memory, dtype=DTYPES[stored.dtype]).reshape(stored.shape)


@contextmanager
def open_torch_save(file: int, at: int, size_bytes: int, where: str) -> Iterator[TorchSaveFile]:
    """Open the torch.save file in these bytes of an open file.

    Damage that is found while it is open is a CorruptionError.
    """
    try:
        with zipfile.ZipFile(_Section(file, at, size_bytes)) as archive:
            yield TorchSaveFile(archive, where)
    except _DAMAGED as error:
        raise CorruptionError(
            f"{where}: {error}; nothing was loaded from it (torch checks none of this when it"
            " loads)"
        ) from error


class _Section(io.RawIOBase):
    """A range of bytes of an open file, as a file of its own."""

    def __init__(self, file: int, at: int, size_bytes: int) -> None:
        self._file = file
        self._begin = at
        self._size = size_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer)[: max(0, self._size - self._at)]
        count = os.preadv(self._file, [room], self._begin + self._at) if room else 0
        self._at += count
        return count


def _range(file: IO[bytes], first: int, size_bytes: int) -> Iterator[bytes]:
    """Yield some bytes of an entry.

    Bytes before them are read, too: seeking would disable the verification of the checksum.
    """
    remaining = first + size_bytes
    while remaining:
        part = file.read(min(remaining, PART_BYTES))
        if not part:
            raise EOFError("a storage ends too early")
        remaining -= len(part)
        if selected := part[max(0, len(part) + remaining - size_bytes) :]:
            yield selected


def _contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for n, s in zip(reversed(shape), reversed(stride), strict=True):
        if n != 1 and s != expected:
            return 0 in shape
        expected *= n
    return True


def _storage(reference: Any) -> TorchStorage:
    """Return a storage by torch's reference: ("storage", class, key, device, elements)."""
    kind, of, key, _, _ = reference
    if kind != "storage" or not isinstance(of, PickleGlobal) or not isinstance(key, str):
        raise ValueError("a reference to no storage")
    return TorchStorage(
        _STORAGES.get(of.name.removeprefix("torch.").removesuffix("Storage"), ""), key
    )


def _tensor_v2(
    storage: TorchStorage,
    offset: int,
    shape: Any,
    stride: Any,
    _grad: Any,
    _hooks: Any,
    extra: Any = (),
) -> StoredTensor:
    return _tensor_v3(storage, offset, shape, stride, _grad, _hooks, None, extra)


def _tensor_v3(
    storage: TorchStorage,
    offset: int,
    shape: Any,
    stride: Any,
    _grad: Any,
    _hooks: Any,
    dtype: PickleGlobal | None,
    extra: Any = (),
) -> StoredTensor:
    name = storage.dtype if dtype is None else dtype.name.removeprefix("torch.")
    if extra or name not in DTYPES:  # such as a conjugate, or a dtype of another torch
        raise CodecError(f"its tensor is of a kind that Outlast cannot read ({name}, {extra!r})")
    sizes, steps = sizes_of(shape), sizes_of(stride)
    if len(sizes) != len(steps):
        raise ValueError("a tensor's shape and strides are of two lengths")
    return StoredTensor(storage, name, int(offset), sizes, steps)


def _bytes(text: str, coding: str) -> bytes:
    """Return bytes from protocol 2's form: text of characters 0 to 255."""
    if coding != "latin1":
        raise ValueError(f"bytes as {coding}")
    return text.encode("latin1")


def _constant(value: PickleGlobal, where: str) -> torch.dtype:
    name = value.name.removeprefix("torch.")
    if name not in DTYPES:
        raise CodecError(f"{where}: its object holds {value.name}, which is no plain value")
    return DTYPES[name]


_KNOWN: dict[str, Builder | None] = {
    **dict.fromkeys(f"torch.{name}" for name in DTYPES),
    **dict.fromkeys(f"torch.{name}Storage" for name in _STORAGES),
    "torch.storage.UntypedStorage": None,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": lambda data, _grad, _hooks: data,
    "torch.Size": lambda sizes: torch.Size(sizes_of(sizes)),
    "torch.device": torch.device,
    "collections.OrderedDict": pickle_reader.ordered,
    "__builtin__.set": pickle_reader.flat_set,
    "builtins.set": pickle_reader.flat_set,
    "__builtin__.frozenset": lambda items=(): pickle_reader.flat_set(items, frozenset),
    "builtins.frozenset": lambda items=(): pickle_reader.flat_set(items, frozenset),
    "__builtin__.complex": complex,
    "builtins.complex": complex,
    "_codecs.encode": _bytes,
}
