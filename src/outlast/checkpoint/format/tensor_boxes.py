"""Boxes: regions of tensors, cut and compared. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple


class Box(NamedTuple):
    """A region of a tensor: `start` inclusive, `size` elements from there, for each dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Return the number of elements; 1 for a 0-d box."""
        return math.prod(self.size)

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box of a complete tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    def within(self, shape: tuple[int, ...]) -> bool:
        """Return whether it lies inside a tensor of `shape`."""
        return len(self.start) == len(self.size) == len(shape) and all(
            a >= 0 and n >= 0 and a + n <= limit
            for a, n, limit in zip(self.start, self.size, shape, strict=True)
        )

    def moved(self, by: tuple[int, ...]) -> Box:
        """Return the same region relative to an origin that lies `by` before this one's."""
        return Box(tuple(a + d for a, d in zip(self.start, by, strict=True)), self.size)

    def relative(self, to: Box) -> Box:
        """Return the same region in coordinates of the box `to`, which contains it."""
        return Box(tuple(a - b for a, b in zip(self.start, to.start, strict=True)), self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the index of the region in its tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))


def overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection; None when it is empty. A 0-d tensor is one element."""
    start: list[int] = []
    size: list[int] = []
    for x, n, y, m in zip(a.start, a.size, b.start, b.size, strict=True):
        first = max(x, y)
        count = min(x + n, y + m) - first
        if count <= 0:
            return None
        start.append(first)
        size.append(count)
    return Box(tuple(start), tuple(size))


def divide(boxes: list[Box], by: Box) -> tuple[list[Box], list[Box]]:
    """Return the parts of `boxes` inside `by` and outside; no new overlaps arise."""
    inside: list[Box] = []
    outside: list[Box] = []
    for box in boxes:
        if hit := overlap(box, by):
            inside.append(hit)
            outside += _around(box, hit)
        else:
            outside.append(box)
    return inside, outside


def _around(box: Box, hole: Box) -> Iterator[Box]:
    """Yield `box` without `hole`, which lies in it."""
    start, size = box
    for d in range(len(start)):
        end = hole.start[d] + hole.size[d]
        if before := hole.start[d] - start[d]:
            yield Box(start, (*size[:d], before, *size[d + 1 :]))
        if behind := start[d] + size[d] - end:
            yield Box((*start[:d], end, *start[d + 1 :]), (*size[:d], behind, *size[d + 1 :]))
        start = (*start[:d], hole.start[d], *start[d + 1 :])
        size = (*size[:d], hole.size[d], *size[d + 1 :])


def runs(shape: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    """Yield the elements `first` to `last` (exclusive) of a tensor in C order, as boxes.

    Each box is one run of memory in a contiguous tensor of `shape`; there are at most 2 *
    len(shape) - 1 of them (0-d: one).
    """
    if first >= last:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    head, tail = -(-first // row), last // row  # the whole rows: head to tail
    if head > tail:  # inside one row
        for box in runs(shape[1:], first - tail * row, last - tail * row):
            yield Box((tail, *box.start), (1, *box.size))
        return
    if first < head * row:
        for box in runs(shape[1:], first - (head - 1) * row, row):
            yield Box((head - 1, *box.start), (1, *box.size))
    if head < tail:
        yield Box((head, *(0,) * (len(shape) - 1)), (tail - head, *shape[1:]))
    if tail * row < last:
        for box in runs(shape[1:], 0, last - tail * row):
            yield Box((tail, *box.start), (1, *box.size))


def shares(sizes: list[int], of: int) -> list[list[tuple[int, int, int]]]:
    """Divide items of `sizes` (elements weighted alike) among `of` takers, within items.

    Taker k gets a list of (item, first, last), consecutive ranges of elements; together they cover
    all elements once, and no two takers differ by more than one element.
    """
    total = sum(sizes)
    cuts = [total * k // of for k in range(of + 1)]
    ranges: list[list[tuple[int, int, int]]] = [[] for _ in range(of)]
    at, taker = 0, 0
    for item, size in enumerate(sizes):
        done = 0
        while done < size:
            while cuts[taker + 1] <= at:
                taker += 1
            count = min(size - done, cuts[taker + 1] - at)
            ranges[taker].append((item, done, done + count))
            done += count
            at += count
    return ranges
