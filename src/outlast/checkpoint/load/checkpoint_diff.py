"""Differences of two checkpoints: suspect tensors by digest, elements, decoded values.

The division of tensors among ranks does not matter.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from outlast.checkpoint.format import codec
from outlast.checkpoint.format.manifests import ITEM_BYTES, Manifest, Tensor
from outlast.checkpoint.format.value_encoder import DTYPES
from outlast.checkpoint.load.checkpoint_reader import (
    BLOCK_BYTES,
    CheckpointReader,
    TensorBlock,
    blocks_of,
    read_blocks,
)
from outlast.checkpoint.stores.catalog import Checkpoint
from outlast.checkpoint.stores.chunk_reader import Chunk

_PART_ELEMENTS = 1 << 20  # widened to 64 bits at a time
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class TensorDifference(msgspec.Struct, frozen=True):
    """A tensor that differs. `a` and `b` describe it on both sides, "" where it is missing.

    `elements`: all of them. `differing`: those that differ (in any bit, or by more than the
    tolerance). `difference_max`: the largest |a - b| of finite numbers. `not_finite`: of those that
    differ, where a NaN or an infinity meets another value. 0 where nothing could be compared.
    """

    name: str
    a: str
    b: str
    elements: int = 0
    differing: int = 0
    difference_max: float = 0.0
    not_finite: int = 0


class _Found(NamedTuple):
    differing: int
    difference_max: float
    not_finite: int


def compare_tensors(
    a: CheckpointReader,
    b: CheckpointReader,
    *,
    wanted: Callable[[str], bool] = lambda _: True,
    tolerance: float | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Iterator[TensorDifference]:
    """Yield every tensor that differs, by name.

    Without `tolerance` one bit is a difference, so that a NaN equals itself and -0.0 is not 0.0;
    with it, numbers that are no further apart are equal, and so are NaNs. Raises as
    `CheckpointReader.read` does.
    """
    first, second = a.checkpoint.tensors, b.checkpoint.tensors
    names = sorted(name for name in first.keys() | second.keys() if wanted(name))
    alike = [n for n in names if n in first and n in second and first[n].shape == second[n].shape]
    total = sum(_size_bytes(first[n]) + _size_bytes(second[n]) for n in alike)
    results = _compare_range(a, b, alike, tolerance, lambda done: on_progress(done, total))
    for name in names:
        tensor_a, tensor_b = first.get(name), second.get(name)
        if tensor_a is None or tensor_b is None or tensor_a.shape != tensor_b.shape:
            yield TensorDifference(name, _describe_tensor(tensor_a), _describe_tensor(tensor_b))
            continue
        differing, largest, not_finite = next(results)
        if differing or tensor_a.dtype != tensor_b.dtype:
            count = math.prod(tensor_a.shape)
            yield TensorDifference(
                name,
                _describe_tensor(tensor_a),
                _describe_tensor(tensor_b),
                count,
                differing,
                largest,
                not_finite,
            )


def _compare_range(
    a: CheckpointReader,
    b: CheckpointReader,
    names: list[str],
    tolerance: float | None,
    on_progress: Callable[[int], None],
) -> Iterator[_Found]:
    """Yield one result for each name, in order."""
    first, second = a.checkpoint.tensors, b.checkpoint.tensors
    done = 0
    pairs = zip(_read(a, first, second, names), _read(b, second, first, names), strict=True)
    for name in names:
        remaining = math.prod(first[name].shape)
        result = _Found(0, 0.0, 0)
        while True:
            (block, data), (other, more) = next(pairs)
            result = _merge(result, _differences(block.tensor, data, other.tensor, more, tolerance))
            remaining -= block.box.elements
            done += len(data) + len(more)
            on_progress(done)
            if remaining <= 0:
                break
        yield result


def _read(
    reader: CheckpointReader,
    tensors: Mapping[str, Tensor],
    other_tensors: Mapping[str, Tensor],
    names: list[str],
) -> Iterator[tuple[TensorBlock, memoryview]]:
    """Yield blocks, sized in elements by the wider of the two types."""

    def blocks() -> Iterator[TensorBlock]:
        for name in names:
            width = ITEM_BYTES[tensors[name].dtype]
            most = BLOCK_BYTES // max(width, ITEM_BYTES[other_tensors[name].dtype])
            yield from blocks_of(name, tensors[name], most * width)

    return read_blocks(reader, blocks())


def _differences(
    a: Tensor, data: memoryview, b: Tensor, more: memoryview, tolerance: float | None
) -> _Found:
    if a.dtype == b.dtype and np.array_equal(
        np.frombuffer(data, np.uint8), np.frombuffer(more, np.uint8)
    ):
        return _Found(0, 0.0, 0)
    result, wide, narrow = _Found(0, 0.0, 0), ITEM_BYTES[a.dtype], ITEM_BYTES[b.dtype]
    for at in range(0, len(data) // wide, _PART_ELEMENTS):
        end = at + _PART_ELEMENTS
        part_a, part_b = data[at * wide : end * wide], more[at * narrow : end * narrow]
        differing = _bits_differ(part_a, part_b, wide) if a.dtype == b.dtype else None
        result = _merge(
            result, _numbers_differ(part_a, a.dtype, part_b, b.dtype, differing, tolerance)
        )
    return result


def _bits_differ(data_a: memoryview, data_b: memoryview, width: int) -> np.ndarray[Any, Any]:
    if width == 16:
        pairs = np.frombuffer(data_a, np.uint64) != np.frombuffer(data_b, np.uint64)
        return pairs.reshape(-1, 2).any(axis=1)
    return np.frombuffer(data_a, _BITS[width]) != np.frombuffer(data_b, _BITS[width])


def _numbers_differ(
    data_a: memoryview,
    kind: str,
    data_b: memoryview,
    other: str,
    bits: np.ndarray[Any, Any] | None,
    tolerance: float | None,
) -> _Found:
    """Return the differences of two ranges of elements.

    `bits`: mask of elements with different bits, where both are of one type.
    """
    a, b = _numbers(data_a, kind), _numbers(data_b, other)
    if a is None or b is None:  # a type that nothing computes with
        return _Found(int(bits.sum()) if bits is not None else len(data_a), 0.0, 0)
    distance, odd = _distances(a, b)
    if tolerance is not None:
        differing = (distance > tolerance) | odd
    elif bits is not None:
        differing = bits
    else:
        differing = (distance > 0) | odd
    largest = float(distance.max(initial=0.0))
    return _Found(int(differing.sum()), largest, int((odd & differing).sum()))


def _numbers(data: memoryview, kind: str) -> np.ndarray[Any, Any] | None:
    """Return the elements in 64 bits, exactly; a complex one as two columns.

    None for a type that torch cannot widen.
    """
    if kind not in DTYPES or kind == "float4_e2m1fn_x2":
        return None
    tensor = torch.frombuffer(data, dtype=DTYPES[kind])
    if tensor.is_complex():
        return torch.view_as_real(tensor).double().numpy()
    if tensor.is_floating_point():
        return tensor.float().double().numpy() if kind != "float64" else tensor.numpy()
    return tensor.numpy().astype(np.uint64 if kind == "uint64" else np.int64)


def _distances(
    a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return |a - b| (0 unless both are finite), and the mask of differing non-finite elements."""
    if a.dtype == b.dtype and a.dtype.kind in "iu":
        larger, smaller = np.maximum(a, b), np.minimum(a, b)
        # Taken modulo 2**64, a difference of 64-bit integers is exact.
        distance = (larger.astype(np.uint64) - smaller.astype(np.uint64)).astype(np.float64)
        return distance, np.zeros(distance.shape, bool)
    a, b = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    with np.errstate(over="ignore"):
        distance = np.abs(np.where(finite, a, 0) - np.where(finite, b, 0))
    odd = ~finite & (a != b) & ~(np.isnan(a) & np.isnan(b))
    if distance.ndim == 2:
        return np.hypot(distance[:, 0], distance[:, 1]), odd.any(axis=1)
    return distance, odd


def _merge(a: _Found, b: _Found) -> _Found:
    return _Found(
        a.differing + b.differing,
        max(a.difference_max, b.difference_max),
        a.not_finite + b.not_finite,
    )


def _size_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def _describe_tensor(tensor: Tensor | None) -> str:
    return f"{tensor.dtype} {' x '.join(map(str, tensor.shape)) or 'one number'}" if tensor else ""


_LISTED_MAX = 8  # of longer lists of numbers the differences are counted
_NUMBERS = (bool, int, float)
_SHOWN_MAX = 60
_ABSENT = object()


class ValueDifference(NamedTuple):
    """The path of a difference (`groups.0.lr`), and short texts of both sides; "" if missing."""

    path: str
    a: str
    b: str


def value_differences(a: Any, b: Any) -> list[ValueDifference]:
    """Return every difference. A NaN equals itself, -0.0 is not 0.0, 1 is not 1.0."""
    return list(_walk((), a, b))


def _walk(path: tuple[str, ...], a: Any, b: Any) -> Iterator[ValueDifference]:
    if type(a) is type(b):
        if isinstance(a, Mapping):
            for key in {**a, **b}:
                yield from _walk((*path, str(key)), a.get(key, _ABSENT), b.get(key, _ABSENT))
            return
        if isinstance(a, (list, tuple)):
            if _many_numbers(a) and _many_numbers(b):
                if differing := sum(_odd(x, y) for x, y in zip_longest(a, b, fillvalue=_ABSENT)):
                    yield _counted(path, differing, len(a), len(b))
                return
            for index, (x, y) in enumerate(zip_longest(a, b, fillvalue=_ABSENT)):
                yield from _walk((*path, str(index)), x, y)
            return
        if isinstance(a, (torch.Tensor, np.ndarray)):
            yield from _arrays(path, _flat(a), _flat(b), _kind(a), _kind(b))
            return
    if _odd(a, b):
        yield ValueDifference(".".join(path), _short(a), _short(b))


def _arrays(
    path: tuple[str, ...], a: Any, b: Any, kind_a: str, kind_b: str
) -> Iterator[ValueDifference]:
    """Yield the difference of two arrays. `a` and `b`: rows of bytes, one for each element."""
    if kind_a != kind_b:
        yield ValueDifference(".".join(path), kind_a, kind_b)
    elif differing := int((a != b).any(axis=1).sum()):
        yield _counted(path, differing, len(a), len(b))


def _flat(array: torch.Tensor | np.ndarray[Any, Any]) -> Any:
    elements = array.numel() if isinstance(array, torch.Tensor) else array.size
    data = codec.raw(array.contiguous()) if isinstance(array, torch.Tensor) else array.tobytes()
    return np.frombuffer(data, np.uint8).reshape(max(elements, 1), -1)


def _kind(array: torch.Tensor | np.ndarray[Any, Any]) -> str:
    shape = " x ".join(map(str, array.shape)) or "one number"
    return f"{str(array.dtype).removeprefix('torch.')} {shape}"


def _counted(path: tuple[str, ...], differing: int, size_a: int, size_b: int) -> ValueDifference:
    summary = f"{differing} differ of {size_a}"
    return ValueDifference(".".join(path), summary, summary if size_a == size_b else f"of {size_b}")


def _many_numbers(values: Sequence[Any]) -> bool:
    return len(values) > _LISTED_MAX and all(type(value) in _NUMBERS for value in values)


def _odd(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return True
    if isinstance(a, (float, np.floating)):
        return struct.pack("d", a) != struct.pack("d", b)
    if isinstance(a, complex):
        return struct.pack("dd", a.real, a.imag) != struct.pack("dd", b.real, b.imag)
    return bool(a != b)


def _short(value: Any) -> str:
    if value is _ABSENT:
        return ""
    line = " ".join(repr(value).split())
    return line if len(line) <= _SHOWN_MAX else line[: _SHOWN_MAX - 3] + "..."


def suspect_tensors(a: Checkpoint, b: Checkpoint) -> set[str]:
    """Return the names of tensors that may differ, or are on one side only.

    All others are equal in every bit. Where the layout of a rank's part differs, all tensors in it
    may differ. Raises CorruptionError or StorageError where a manifest is unreadable.
    """
    suspects: set[str] = set()
    for manifest_a, manifest_b in zip_longest(a.manifests, b.manifests):
        if manifest_a is None or manifest_b is None or not _laid_out_alike(manifest_a, manifest_b):
            suspects |= {name for each in (manifest_a, manifest_b) if each for name in each.tensors}
            continue
        pairs = enumerate(zip_longest(manifest_a.chunks, manifest_b.chunks))
        for number in [number for number, (digest_a, digest_b) in pairs if digest_a != digest_b]:
            for manifest in (manifest_a, manifest_b):
                if number < len(manifest.chunks):
                    suspects |= {
                        n for n in Chunk(manifest, number).tensors if n in manifest.tensors
                    }
    return suspects


def _laid_out_alike(a: Manifest, b: Manifest) -> bool:
    """Return whether the shards have the same layout, so that their bytes are comparable."""
    return (a.chunk_bytes, a.tensors, a.pieces) == (b.chunk_bytes, b.tensors, b.pieces)
