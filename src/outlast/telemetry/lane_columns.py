"""A rank's time as few columns, for figures and pages, and the colours of buckets."""

from __future__ import annotations

import numpy as np

from outlast.telemetry.history.time_claims import Claims, merge
from outlast.telemetry.time_accounting import BUCKETS, Bucket, RankLane, Span

COLUMNS = 1500  # a lane is drawn in so many columns at most, each in its main bucket's colour
# Okabe and Ito's colours: work in blues, costs of failures in vermilion and yellow.
COLOUR: dict[Bucket, str] = {
    "start": "#aaaaaa",
    "step": "#0072b2",
    "eval": "#56b4e9",
    "checkpoint": "#cc79a7",
    "script": "#b3d4e8",
    "lost": "#d55e00",
    "recovery": "#f0e442",
    "absent": "#f7f7f7",
    "stop": "#dddddd",
    "down": "#333333",
}
_FAILED: frozenset[Bucket] = frozenset(("lost", "recovery", "down"))
_FAILED_WEIGHT = 3  # a short recovery stays visible in a long run
_WEIGHTS = np.array([_FAILED_WEIGHT if bucket in _FAILED else 1 for bucket in BUCKETS])


def columns(claims: Claims, begin_ns: int, wall_ns: int, count: int = COLUMNS) -> list[Span]:
    """Return the time of a lane, or of several, as at most `count` columns, neighbours joined.

    Each has the bucket that fills most of it; costs of failures count threefold.
    """
    if not len(claims.begin):
        return []
    width_ns = max(1, -(-wall_ns // count))
    begin, end = claims.begin - begin_ns, claims.end - begin_ns
    first = begin // width_ns
    pieces = (end - 1) // width_ns - first + 1
    claim = np.repeat(np.arange(len(pieces)), pieces)
    column = first[claim] + np.arange(len(claim)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    filled_ns = np.minimum(end[claim], width_ns * (column + 1))
    filled_ns -= np.maximum(begin[claim], width_ns * column)
    code = claims.code[claim]
    lowest = int(column.min())
    shape = (int(column.max()) - lowest + 1, len(BUCKETS))
    place = (column - lowest) * len(BUCKETS) + code
    weights = np.zeros(shape, np.int64)
    np.add.at(weights.reshape(-1), place, filled_ns * _WEIGHTS[code])
    earliest = np.full(shape, len(place))  # of equal buckets, the first one is drawn
    np.minimum.at(earliest.reshape(-1), place, np.arange(len(place)))
    heaviest = weights == weights.max(axis=1, keepdims=True)
    drawn = np.where(heaviest, earliest, len(place)).argmin(axis=1).astype(np.uint8)
    used = np.flatnonzero(weights.any(axis=1))
    begins = begin_ns + (used + lowest) * width_ns
    joined, _ = merge(Claims(begins, begins + width_ns, drawn[used]), np.zeros(len(used), np.int64))
    return RankLane(0, joined).spans
