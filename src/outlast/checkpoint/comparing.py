"""Two checkpoints held against each other, element by element, in blocks that fit into memory.

How their tensors were divided among ranks does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from outlast.checkpoint.dtypes import ITEM_BYTES
from outlast.checkpoint.foreign.blocks import BLOCK_BYTES, Block, blocks_of, read_blocks
from outlast.checkpoint.foreign.dtypes import DTYPES
from outlast.checkpoint.reader import Reader
from outlast.checkpoint.record import Tensor

_PART_ELEMENTS = 1 << 20  # widened to 64 bits at a time
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Difference(msgspec.Struct, frozen=True):
    """A tensor that is not the same in both. `a` and `b` say what it is there, "" where it is not.

    `elements`: all of them. `differing`: those that differ (in any bit, or by more than the
    tolerance). `difference_max`: the largest |a - b| of finite numbers. `not_finite`: of those that
    differ, where a NaN or an infinity faces something else. 0 where nothing could be compared.
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


def compare(
    a: Reader,
    b: Reader,
    *,
    wanted: Callable[[str], bool] = lambda _: True,
    tolerance: float | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Iterator[Difference]:
    """Every tensor that differs, by name. Without `tolerance` one bit is a difference, so that a
    NaN equals itself and -0.0 is not 0.0; with it, numbers that are no further apart are equal, and
    so are NaNs. Raises as `Reader.read` does.
    """
    left, right = a.checkpoint.tensors, b.checkpoint.tensors
    names = sorted(name for name in left.keys() | right.keys() if wanted(name))
    alike = [n for n in names if n in left and n in right and left[n].shape == right[n].shape]
    total = sum(_size_bytes(left[n]) + _size_bytes(right[n]) for n in alike)
    found = _compared(a, b, alike, tolerance, lambda done: on_progress(done, total))
    for name in names:
        one, two = left.get(name), right.get(name)
        if one is None or two is None or one.shape != two.shape:
            yield Difference(name, _said(one), _said(two))
            continue
        differing, largest, not_finite = next(found)
        if differing or one.dtype != two.dtype:
            count = math.prod(one.shape)
            yield Difference(name, _said(one), _said(two), count, differing, largest, not_finite)


def _compared(
    a: Reader,
    b: Reader,
    names: list[str],
    tolerance: float | None,
    on_progress: Callable[[int], None],
) -> Iterator[_Found]:
    """One result for each name, in order."""
    one, two = a.checkpoint.tensors, b.checkpoint.tensors
    done = 0
    pairs = zip(_read(a, one, two, names), _read(b, two, one, names), strict=True)
    for name in names:
        left = math.prod(one[name].shape)
        result = _Found(0, 0.0, 0)
        while True:
            (block, data), (other, more) = next(pairs)
            result = _merged(
                result, _differences(block.tensor, data, other.tensor, more, tolerance)
            )
            left -= block.box.elements
            done += len(data) + len(more)
            on_progress(done)
            if left <= 0:
                break
        yield result


def _read(
    reader: Reader, tensors: Mapping[str, Tensor], others: Mapping[str, Tensor], names: list[str]
) -> Iterator[tuple[Block, memoryview]]:
    """Blocks of so many elements as the wider of the two types allows."""

    def blocks() -> Iterator[Block]:
        for name in names:
            width = ITEM_BYTES[tensors[name].dtype]
            most = BLOCK_BYTES // max(width, ITEM_BYTES[others[name].dtype])
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
        one, two = data[at * wide : end * wide], more[at * narrow : end * narrow]
        differing = _bits_differ(one, two, wide) if a.dtype == b.dtype else None
        result = _merged(result, _numbers_differ(one, a.dtype, two, b.dtype, differing, tolerance))
    return result


def _bits_differ(one: memoryview, two: memoryview, width: int) -> np.ndarray[Any, Any]:
    if width == 16:
        pairs = np.frombuffer(one, np.uint64) != np.frombuffer(two, np.uint64)
        return pairs.reshape(-1, 2).any(axis=1)
    return np.frombuffer(one, _BITS[width]) != np.frombuffer(two, _BITS[width])


def _numbers_differ(
    one: memoryview,
    kind: str,
    two: memoryview,
    other: str,
    bits: np.ndarray[Any, Any] | None,
    tolerance: float | None,
) -> _Found:
    """`bits`: which elements have other bits, where both are of one type."""
    a, b = _numbers(one, kind), _numbers(two, other)
    if a is None or b is None:  # a type that nothing computes with
        return _Found(int(bits.sum()) if bits is not None else len(one), 0.0, 0)
    apart, odd = _apart(a, b)
    if tolerance is not None:
        differing = (apart > tolerance) | odd
    elif bits is not None:
        differing = bits
    else:
        differing = (apart > 0) | odd
    largest = float(apart.max(initial=0.0))
    return _Found(int(differing.sum()), largest, int((odd & differing).sum()))


def _numbers(data: memoryview, kind: str) -> np.ndarray[Any, Any] | None:
    """The elements in 64 bits, exactly; a complex one as two columns. None for a type that torch
    cannot widen."""
    if kind not in DTYPES or kind == "float4_e2m1fn_x2":
        return None
    tensor = torch.frombuffer(data, dtype=DTYPES[kind])
    if tensor.is_complex():
        return torch.view_as_real(tensor).double().numpy()
    if tensor.is_floating_point():
        return tensor.float().double().numpy() if kind != "float64" else tensor.numpy()
    return tensor.numpy().astype(np.uint64 if kind == "uint64" else np.int64)


def _apart(
    a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """|a - b| where both are finite and else 0; where one is not finite and the other differs."""
    if a.dtype == b.dtype and a.dtype.kind in "iu":
        larger, smaller = np.maximum(a, b), np.minimum(a, b)
        # Taken modulo 2**64, a difference of 64-bit integers is exact.
        apart = (larger.astype(np.uint64) - smaller.astype(np.uint64)).astype(np.float64)
        return apart, np.zeros(apart.shape, bool)
    a, b = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    with np.errstate(over="ignore"):
        apart = np.abs(np.where(finite, a, 0) - np.where(finite, b, 0))
    odd = ~finite & (a != b) & ~(np.isnan(a) & np.isnan(b))
    if apart.ndim == 2:
        return np.hypot(apart[:, 0], apart[:, 1]), odd.any(axis=1)
    return apart, odd


def _merged(a: _Found, b: _Found) -> _Found:
    return _Found(
        a.differing + b.differing,
        max(a.difference_max, b.difference_max),
        a.not_finite + b.not_finite,
    )


def _size_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def _said(tensor: Tensor | None) -> str:
    return f"{tensor.dtype} {' x '.join(map(str, tensor.shape)) or 'one number'}" if tensor else ""
