"""Division of time windows among claims, for many windows at once.

Windows and claims are arrays of begins and ends, the ends not included.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outlast.telemetry.history.event_columns import Column, Integers


class Windows(NamedTuple):
    """Windows by begin, without overlaps."""

    begin: Column
    end: Column


class Claims(NamedTuple):
    """Windows with the code of their bucket."""

    begin: Column
    end: Column
    code: Column

    def chosen(self, which: Column | slice) -> Claims:
        """Return those of a mask, of indices or of a slice."""
        return Claims(self.begin[which], self.end[which], self.code[which])


def claims_of(windows: Windows, code: int) -> Claims:
    """Return windows as claims of one bucket."""
    return Claims(*windows, np.full(len(windows.begin), code, np.uint8))


def disjoint(claims: Claims) -> Claims:
    """Cut each claim where an earlier one ends; leave out empty ones. `claims`: by begin."""
    if not len(claims.begin):
        return claims
    reached = np.maximum.accumulate(claims.end)
    begin = claims.begin.copy()
    begin[1:] = np.maximum(begin[1:], reached[:-1])
    kept = begin < claims.end
    cut = claims._replace(begin=begin)
    return cut if kept.all() else cut.chosen(kept)


def carve(free: Windows, claims: Claims) -> tuple[Claims, Windows]:
    """Give each claim its part of the free windows; return the parts and the rest.

    `claims`: by begin, without overlaps.
    """
    first = np.searchsorted(free.end, claims.begin, "right")
    counts = np.maximum(np.searchsorted(free.begin, claims.end, "left") - first, 0)
    claim = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(claim)) - np.repeat(np.cumsum(counts) - counts, counts)
    window = first[claim] + within
    begin = np.maximum(claims.begin[claim], free.begin[window])
    end = np.minimum(claims.end[claim], free.end[window])
    # Each window is: its begin, the part's begin, the part's end, ..., its end.
    rest_begin = np.sort(np.concatenate((free.begin, end)), kind="stable")
    rest_end = np.sort(np.concatenate((begin, free.end)), kind="stable")
    kept = rest_begin < rest_end
    return Claims(begin, end, claims.code[claim]), Windows(rest_begin[kept], rest_end[kept])


def merge(claims: Claims, lane: Integers) -> tuple[Claims, Integers]:
    """Join adjacent claims of one bucket and lane. `claims`: by lane and begin."""
    if not len(claims.begin):
        return claims, lane
    is_first = np.ones(len(lane), np.bool_)
    is_first[1:] = (
        (claims.code[1:] != claims.code[:-1])
        | (claims.begin[1:] != claims.end[:-1])
        | (lane[1:] != lane[:-1])
    )
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(lane)) - 1
    return Claims(claims.begin[first], claims.end[last], claims.code[first]), lane[first]
