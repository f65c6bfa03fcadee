"""Ranks of a group as spans: groups of a device mesh have regular ranks, and few spans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class RankSpan(NamedTuple):
    """The ranks `first`, `first + step`, and so on: `size` of them."""

    first: int
    size: int
    step: int


def pack_ranks(ranks: Sequence[int]) -> tuple[RankSpan, ...]:
    """Return increasing ranks as spans, as few as a look at each rank finds."""
    spans: list[RankSpan] = []
    for rank in ranks:
        last = spans[-1] if spans else None
        if last is not None and last.size == 1:
            spans[-1] = RankSpan(last.first, 2, rank - last.first)
        elif last is not None and rank == last.first + last.size * last.step:
            spans[-1] = RankSpan(last.first, last.size + 1, last.step)
        else:
            spans.append(RankSpan(rank, 1, 1))
    return tuple(spans)


def has_rank(spans: Sequence[RankSpan], rank: int) -> bool:
    """Return whether a rank is in one of the spans."""
    for first, size, step in spans:
        place, rest = divmod(rank - first, step)
        if not rest and 0 <= place < size:
            return True
    return False


def unpack_ranks(spans: Sequence[RankSpan]) -> Iterator[int]:
    """Yield the ranks of spans."""
    for first, size, step in spans:
        yield from (first + index * step for index in range(size))
