"""Time of ranks as few columns, for figures and pages, and the colours of buckets."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outlast.telemetry.history.event_columns import Integers
from outlast.telemetry.history.time_buckets import BUCKETS, Bucket, Span
from outlast.telemetry.history.time_claims import Claims

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


class LaneColumns(NamedTuple):
    """Time of rows of ranks in columns. `filled_ns`: by row, column and bucket."""

    begin_ns: int
    end_ns: int
    width_ns: int
    filled_ns: NDArray[np.int64]

    def extended(self, claims: Claims, row: Integers, end_ns: int) -> LaneColumns:
        """Return the columns with further claims of rows, until a later end."""
        count = -(-(end_ns - self.begin_ns) // self.width_ns)
        added_ns = np.zeros((len(self.filled_ns), count + 1, len(BUCKETS)), np.int64)
        begin, end = (edge - self.begin_ns for edge in claims[:2])
        first, last = begin // self.width_ns, (end - 1) // self.width_ns

        def add(column: Integers, ns: Integers | int) -> None:
            place = (row * (count + 1) + column) * len(BUCKETS) + claims.code
            np.add.at(added_ns.reshape(-1), place, ns)

        add(first + 1, self.width_ns)  # whole columns, as differences to their neighbours
        add(np.maximum(last, first + 1), -self.width_ns)
        np.cumsum(added_ns, axis=1, out=added_ns)
        add(first, np.minimum(end, (first + 1) * self.width_ns) - begin)
        add(last, np.where(last > first, end - last * self.width_ns, 0))
        filled_ns = added_ns[:, :-1]
        filled_ns[:, : self.filled_ns.shape[1]] += self.filled_ns
        return self._replace(end_ns=end_ns, filled_ns=filled_ns)

    def joined(self, columns_max: int) -> LaneColumns:
        """Return at most `columns_max` columns: neighbours are joined in pairs."""
        found = self
        while found.filled_ns.shape[1] > columns_max:
            odd = found.filled_ns.shape[1] % 2
            even = np.pad(found.filled_ns, ((0, 0), (0, odd), (0, 0)))
            found = found._replace(
                width_ns=2 * found.width_ns, filled_ns=even[:, ::2] + even[:, 1::2]
            )
        return found

    def spans(self) -> list[list[Span]]:
        """Return each row as spans. Each column has the bucket that fills most of it; costs of
        failures count threefold."""
        codes = (self.filled_ns * _WEIGHTS).argmax(axis=2)
        is_used = self.filled_ns.max(axis=2, initial=0) > 0
        return [self._spans(*row) for row in zip(codes, is_used, strict=True)]

    def _spans(self, codes: Integers, is_used: NDArray[np.bool_]) -> list[Span]:
        drawn = np.where(is_used, codes, -1)
        firsts = np.flatnonzero(np.diff(drawn, prepend=-2))
        edges_ns = np.append(self.begin_ns + firsts * self.width_ns, self.end_ns)
        each = zip(
            edges_ns[:-1].tolist(), edges_ns[1:].tolist(), drawn[firsts].tolist(), strict=True
        )
        return [Span(begin, end, BUCKETS[code]) for begin, end, code in each if code >= 0]


def empty_columns(begin_ns: int, width_ns: int, rows: int) -> LaneColumns:
    """Return rows without any time."""
    return LaneColumns(begin_ns, begin_ns, width_ns, np.zeros((rows, 0, len(BUCKETS)), np.int64))


def columns(claims: Claims, begin_ns: int, wall_ns: int, count: int = COLUMNS) -> list[Span]:
    """Return the time of a lane as at most `count` columns, neighbours joined."""
    empty = empty_columns(begin_ns, max(1, -(-wall_ns // count)), 1)
    row = np.zeros(len(claims.begin), np.int64)
    return empty.extended(claims, row, begin_ns + wall_ns).spans()[0]
