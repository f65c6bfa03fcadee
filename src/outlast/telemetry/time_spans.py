"""Spans of time, and the division of a window among claims without gaps or overlaps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

Bucket = Literal[
    "start",  # until a seat's first phase of a term
    "step",  # phases with an optimizer, the attempt that counted
    "eval",  # phases without one
    "checkpoint",  # phases that write a checkpoint
    "script",  # the script's own code between phases
    "lost",  # attempts thrown away, phases rolled back, what a dead worker was in the middle of
    "recovery",  # from a generation's end to the next one's beginning, outside of attempts
    "stop",  # after a seat's last phase of a term
    "down",  # between two terms: no launcher
]
BUCKETS: tuple[Bucket, ...] = get_args(Bucket)


class Window(NamedTuple):
    """Interval of Unix nanoseconds, the end not included."""

    begin_ns: int
    end_ns: int


class Span(NamedTuple):
    """Window that belongs to one bucket."""

    begin_ns: int
    end_ns: int
    bucket: Bucket


def carve(free: list[Window], claims: Iterable[Span]) -> tuple[list[Span], list[Window]]:
    """Give each claim its part of `free` (sorted, disjoint); return the parts and the rest.

    Where claims overlap, the one that begins first has precedence.
    """
    given: list[Span] = []
    rest: list[Window] = []
    ordered = _disjoint(claims)
    index = 0
    for window in free:
        at = window.begin_ns
        while index < len(ordered) and ordered[index].end_ns <= at:
            index += 1
        look = index
        while look < len(ordered) and ordered[look].begin_ns < window.end_ns:
            claim = ordered[look]
            begin, end = max(at, claim.begin_ns), min(window.end_ns, claim.end_ns)
            if at < begin:
                rest.append(Window(at, begin))
            given.append(Span(begin, end, claim.bucket))
            at = end
            look += 1
        index = max(index, look - 1)
        if at < window.end_ns:
            rest.append(Window(at, window.end_ns))
    return given, rest


def _disjoint(claims: Iterable[Span]) -> list[Span]:
    """Return claims by begin, each cut where an earlier one holds; without empty ones."""
    kept: list[Span] = []
    for claim in sorted(claims):
        begin_ns = max(claim.begin_ns, kept[-1].end_ns) if kept else claim.begin_ns
        if begin_ns < claim.end_ns:
            kept.append(claim._replace(begin_ns=begin_ns))
    return kept


def merge(spans: Iterable[Span]) -> list[Span]:
    """Return spans by time, with neighbours of one bucket joined."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and merged[-1].bucket == span.bucket and merged[-1].end_ns == span.begin_ns:
            merged[-1] = merged[-1]._replace(end_ns=span.end_ns)
        else:
            merged.append(span)
    return merged
