"""One part of a checkpoint: a value in a file, streamed both ways.

The file is the blob of tree.py, byte for byte: `OLB1 | length of schema | schema | tensors |
xxh3_128`; only one tensor at a time is held besides the value itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from outlast.checkpoint import decoder, tree
from outlast.checkpoint.schema import BLOB_MAGIC, DIGEST_BYTES, SIZE, TensorSpec
from outlast.errors import CorruptionError

_CHUNK_BYTES = 8 << 20


def write(path: Path, value: Any, progress: Callable[[int], None]) -> tuple[int, str]:
    """Write `value` to `path`, durable when this returns: (bytes, xxh3_128 in hex).

    `progress` is told the bytes written so far, every 8 MiB at the latest. Raises CodecError
    before the file is touched, and OSError.
    """
    schema, tensors = tree.flatten(value)
    state, size = xxhash.xxh3_128(), 0
    with path.open("wb") as file:
        for source in (BLOB_MAGIC, SIZE.pack(len(schema)), schema, *tensors):
            view = tree.raw(source) if isinstance(source, torch.Tensor) else memoryview(source)
            for at in range(0, len(view), _CHUNK_BYTES):
                chunk = view[at : at + _CHUNK_BYTES]
                state.update(chunk)
                size += file.write(chunk)
                progress(size)
        size += file.write(state.digest())
        file.flush()
        os.fsync(file.fileno())
    return size, state.hexdigest()


def read(path: Path) -> tuple[Any, str]:
    """The value of a file and its xxh3_128 in hex. Tensors are on the CPU.

    Raises CorruptionError when any bit of it is wrong, and OSError.
    """
    with path.open("rb") as file:
        return _Source(file, path).value()


class _Source:
    """A file being read: every byte that is taken is digested."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._size = os.fstat(file.fileno()).st_size
        self._state = xxhash.xxh3_128()

    def value(self) -> tuple[Any, str]:
        head = self._take(len(BLOB_MAGIC) + SIZE.size)
        (schema_bytes,) = SIZE.unpack_from(head, len(BLOB_MAGIC))
        left = self._size - len(head) - DIGEST_BYTES
        if head[: len(BLOB_MAGIC)] != BLOB_MAGIC or schema_bytes > left:
            raise self._damaged("its head is not that of a part of version 1")
        try:
            schema = self._take(schema_bytes)
            # Sizes first, so that a damaged file never asks for memory that it does not fill.
            if sum(spec.size_bytes for spec in tree.layout(schema)) != left - schema_bytes:
                raise self._damaged("its length does not fit its schema")
            value = decoder.read(schema, self._tensor)
        except CorruptionError as error:
            raise self._damaged(str(error)) from error
        if self._file.read() != self._state.digest():
            raise self._damaged("its bytes do not match its digest")
        return value, self._state.hexdigest()

    def _take(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) != size:
            raise self._damaged("it is cut short")
        self._state.update(data)
        return data

    def _tensor(self, spec: TensorSpec) -> torch.Tensor:
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        view = tree.raw(tensor)
        for at in range(0, len(view), _CHUNK_BYTES):
            chunk = view[at : at + _CHUNK_BYTES]
            if _fill(self._file, chunk) != len(chunk):
                raise self._damaged("it is cut short")
            self._state.update(chunk)
        return tensor

    def _damaged(self, what: str) -> CorruptionError:
        return CorruptionError(f"{self._path}: {what}; nothing was taken over from it")


def _fill(file: BinaryIO, view: memoryview) -> int:
    """Read until `view` is full or the file ends; how many bytes there were."""
    done = 0
    while done < len(view):
        data = file.readinto(view[done:])  # pyright: ignore[reportAttributeAccessIssue]
        if not data:
            break
        done += data
    return done
