"""Which node, or which link between two, is slow: pairs measured, and what is slow measured again
beside nodes that are fast.

Pure. Pairs of one round are disjoint, so that they run at once: two rounds for all neighbours on a
ring (three where their number is odd), and a few for the nodes that no neighbour was fast with.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from itertools import pairwise
from typing import NamedTuple

Pair = tuple[int, int]  # the lower first
Measured = dict[Pair, float]  # bytes a second; 0 where no answer came
Search = Generator[list[Pair], Mapping[Pair, float], Measured]

SLOW_SHARE = 0.6  # of what a good pair of neighbours does, where nobody says what is expected
GOOD_QUARTILE = 0.75  # of the pairs of neighbours: a slow node makes two of them slow
PARTNERS_MAX = 3  # fast nodes that a suspect is measured beside


class Verdict(NamedTuple):
    """`unclear`: nothing was fast, so nothing can be told apart."""

    nodes: frozenset[int]
    links: frozenset[Pair]
    least: float
    unclear: bool


def search(world: int, least: float | None) -> Search:
    """Yields rounds of pairs, is sent what each measured, returns all of it. `least`: bytes a
    second of a fast pair; None: a share of the upper quartile of neighbours."""
    measured: Measured = {}
    for asked in _ring(world):
        measured |= yield asked
    for _ in range(PARTNERS_MAX):
        asked = _suspects_beside_fast(world, measured, threshold(world, measured, least))
        if not asked:
            break
        measured |= yield asked
    return measured


def _ring(world: int) -> list[list[Pair]]:
    pairs = list(pairwise(range(world)))
    rounds = [pairs[0::2], pairs[1::2]]
    if world > 2:
        last: Pair = (0, world - 1)
        if world % 2:
            rounds.append([last])
        else:
            rounds[1].append(last)
    return [asked for asked in rounds if asked]


def threshold(world: int, measured: Measured, least: float | None) -> float:
    if least is not None:
        return least
    ring = sorted(measured.get(pair, 0.0) for asked in _ring(world) for pair in asked)
    return SLOW_SHARE * ring[int(GOOD_QUARTILE * (len(ring) - 1) + 0.5)] if ring else 0.0


def _fast(measured: Measured, least: float) -> set[int]:
    """Nodes of fast pairs: neither of such a pair is slow."""
    return {node for pair, speed in measured.items() if speed >= least > 0 for node in pair}


def _suspects_beside_fast(world: int, measured: Measured, least: float) -> list[Pair]:
    """Each node that was not fast with anybody, with one that was fast and is new to it."""
    fast = _fast(measured, least)
    free = sorted(fast)
    asked: list[Pair] = []
    for suspect in sorted(set(range(world)) - fast):
        for other in free:
            pair = (min(suspect, other), max(suspect, other))
            if pair not in measured:
                asked.append(pair)
                free.remove(other)
                break
    return asked


def verdict(world: int, measured: Measured, least: float | None) -> Verdict:
    """A node is slow that was fast with nobody; a link, where both of its ends were fast with
    others."""
    line = threshold(world, measured, least)
    fast = _fast(measured, line)
    if not fast:
        return Verdict(frozenset(), frozenset(), line, unclear=True)
    slow = frozenset(range(world)) - fast
    links = {pair for pair, speed in measured.items() if speed < line and not slow & set(pair)}
    return Verdict(slow, frozenset(links), line, unclear=False)
