"""Routes of chunks that several ranks need. Pure.

Chunks are numbered over all shards. A chunk that ranks 1, 2 and 5 want and 2 reads goes from 2 to 1
and from 1 to 5: the chain does not depend on the reader, so that on every rank chunks come in the
order of their numbers, and a chain of any length needs only a few of them in memory at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import msgspec

Span = tuple[int, int]  # the first chunk, and the one behind the last


class Wants(msgspec.Struct, frozen=True, array_like=True):
    """One rank's chunks of one pass, as spans in order.

    `in_memory`: those of them that it has in memory. `done`: it has no further pass.
    """

    wanted: list[Span] = []
    in_memory: list[Span] = []
    done: bool = False


class Leg(NamedTuple):
    """One rank's part in the route of a chunk.

    `source`: the rank to receive it from, None where this one reads it. `to`: the rank to send it
    to, None at the end of the chain.
    """

    chunk: int
    source: int | None
    to: int | None


class Legs(NamedTuple):
    """One rank's pass, in the order of chunks. `alone`: chunks that only this rank needs."""

    relayed: list[Leg]
    alone: list[int]


def spans(numbers: Iterable[int]) -> list[Span]:
    """Return ascending numbers as spans."""
    result: list[Span] = []
    for number in numbers:
        if result and result[-1][1] == number:
            result[-1] = result[-1][0], number + 1
        else:
            result.append((number, number + 1))
    return result


def legs_of(rank: int, chain: Sequence[int], wants: Sequence[Wants]) -> Legs:
    """Return one rank's legs of a pass in which each rank announced its wants.

    `chain`: all ranks in the order in which chunks pass them. Ranks that want a chunk read in turn,
    except that a rank that has the chunk in memory is its reader. The legs of all ranks match, as
    all compute them from the same input.
    """
    position = {each: at for at, each in enumerate(chain)}
    holders = _holders(wants)
    turns: Counter[tuple[int, ...]] = Counter()
    legs = Legs([], [])
    for first, end, ranks in _segments(wants, rank):
        wanting = tuple(sorted(ranks, key=position.__getitem__))
        ends: dict[int, tuple[int | None, int | None]] = {}
        for chunk in range(first, end):
            if held_by := holders.get(chunk):
                way = _way(wanting, held_by)
                source, to = _ends(way, rank)
                if len(way) == 1 or rank not in way:
                    legs.alone.append(chunk)
                    continue
            elif len(wanting) == 1:
                legs.alone.append(chunk)
                continue
            else:
                reader = wanting[turns[wanting] % len(wanting)]
                turns[wanting] += 1
                if reader not in ends:
                    ends[reader] = _ends(_way(wanting, [reader]), rank)
                source, to = ends[reader]
            legs.relayed.append(Leg(chunk, source, to))
    return legs


def _way(wanting: Sequence[int], held_by: Collection[int]) -> list[int]:
    """Return the first holder, and then all that lack the chunk."""
    reader = next(each for each in wanting if each in held_by)
    return [reader, *(each for each in wanting if each not in held_by)]


def _ends(way: Sequence[int], rank: int) -> tuple[int | None, int | None]:
    if rank not in way:
        return None, None
    at = way.index(rank)
    return way[at - 1] if at else None, way[at + 1] if at + 1 < len(way) else None


def _holders(wants: Sequence[Wants]) -> dict[int, set[int]]:
    holders: dict[int, set[int]] = {}
    for rank, each in enumerate(wants):
        for first, end in each.in_memory:
            for chunk in range(first, end):
                holders.setdefault(chunk, set()).add(rank)
    return holders


def _segments(all_wants: Sequence[Wants], rank: int) -> Iterator[tuple[int, int, frozenset[int]]]:
    """Yield the longest spans that `rank` wants with a constant set of wanting ranks."""
    borders = sorted(
        (at, each, begins)
        for each, wants in enumerate(all_wants)
        for span in wants.wanted
        for at, begins in zip(span, (True, False), strict=True)
    )
    wanting: set[int] = set()
    before = 0
    for at, changes in groupby(borders, key=itemgetter(0)):
        if rank in wanting:
            yield before, at, frozenset(wanting)
        for _, each, begins in changes:
            if begins:
                wanting.add(each)
            else:
                wanting.discard(each)
        before = at
