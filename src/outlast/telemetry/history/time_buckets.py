"""Buckets of time, and accounts whose sums are exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import numpy as np

from outlast.errors import CorruptionError
from outlast.telemetry.history.event_columns import Integers
from outlast.telemetry.history.time_claims import Claims, Windows, claims_of, merge

Bucket = Literal[
    "start",  # until a seat's first phase of a term
    "step",  # phases with an optimizer, the attempt that counted
    "eval",  # phases without one
    "checkpoint",  # phases that write a checkpoint
    "script",  # the script's own code between phases
    "lost",  # discarded attempts, phases rolled back, the interrupted phase of a dead worker
    "recovery",  # from a generation's end to the next one's beginning, outside of attempts
    "absent",  # without a worker for the seat, while the others go on (rung shrink)
    "stop",  # after a seat's last phase of a term
    "down",  # between two terms: no launcher
]
BUCKETS: tuple[Bucket, ...] = get_args(Bucket)


CODES: dict[Bucket, int] = {bucket: code for code, bucket in enumerate(BUCKETS)}


class Span(NamedTuple):
    """Interval of Unix nanoseconds, the end not included, that belongs to one bucket."""

    begin_ns: int
    end_ns: int
    bucket: Bucket


TOLERANCE_NS = 1_000
_PRODUCTIVE: tuple[Bucket, ...] = ("step", "eval", "script")


class RankLane(NamedTuple):
    """Complete time of one seat: adjacent claims, in order."""

    seat: int
    claims: Claims

    @property
    def spans(self) -> list[Span]:
        """The claims as spans."""
        begins, ends, codes = (column.tolist() for column in self.claims)
        buckets = (BUCKETS[code] for code in codes)
        return [Span(*span) for span in zip(begins, ends, buckets, strict=True)]


@dataclass(frozen=True, kw_only=True)
class TimeTotals:
    """Time of a run by bucket. `totals_ns` are sums over seats; they add up to wall x seats."""

    begin_ns: int
    end_ns: int
    seats: int
    totals_ns: Mapping[Bucket, int]

    @property
    def wall_ns(self) -> int:
        """Wall time from begin to end."""
        return self.end_ns - self.begin_ns

    @property
    def capacity_ns(self) -> int:
        """Wall time multiplied by the number of seats."""
        return self.wall_ns * self.seats

    @property
    def goodput(self) -> float:
        """Share of the capacity spent in committed steps."""
        return self.totals_ns["step"] / self.capacity_ns if self.capacity_ns else 0.0

    @property
    def ettr(self) -> float:
        """Share of the capacity in productive buckets (effective training time ratio)."""
        productive_ns = sum(self.totals_ns[bucket] for bucket in _PRODUCTIVE)
        return productive_ns / self.capacity_ns if self.capacity_ns else 0.0


@dataclass(frozen=True, kw_only=True)
class TimeAccount(TimeTotals):
    """Account of a run's time. `claims`: those of all seats, by seat and begin; `seat`: whose."""

    claims: Claims
    seat: Integers

    @property
    def totals(self) -> TimeTotals:
        """The account without its claims."""
        return TimeTotals(
            begin_ns=self.begin_ns, end_ns=self.end_ns, seats=self.seats, totals_ns=self.totals_ns
        )

    def between(self, begin_ns: int, end_ns: int) -> TimeAccount:
        """Return the account of a part of the time."""
        begin, end = (np.clip(edge, begin_ns, end_ns) for edge in self.claims[:2])
        kept = np.flatnonzero(begin < end)
        claims = Claims(begin[kept], end[kept], self.claims.code[kept])
        return account_of([(claims, self.seat[kept])], begin_ns, end_ns, self.seats)

    @property
    def lanes(self) -> list[RankLane]:
        """Time of each seat."""
        edges = np.searchsorted(self.seat, np.arange(self.seats + 1)).tolist()
        each = (self.claims.chosen(slice(*edge)) for edge in pairwise(edges))
        return [RankLane(seat, claims) for seat, claims in enumerate(each)]


def account_of(
    parts: Sequence[tuple[Claims, Integers]], begin_ns: int, end_ns: int, seats: int
) -> TimeAccount:
    """Return the account of all seats, with the totals. Raises CorruptionError."""
    nothing = claims_of(Windows(np.empty(0, np.int64), np.empty(0, np.int64)), 0)
    parts = parts or [(nothing, np.empty(0, np.int64))]
    claims = Claims(*map(np.concatenate, zip(*(claims for claims, _ in parts), strict=True)))
    lane = np.concatenate([lane for _, lane in parts])
    if len(parts) > 1:
        order = np.argsort(lane, kind="stable")
        claims, lane = claims.chosen(order), lane[order]
    claims, lane = merge(claims, lane)
    length_ns = claims.end - claims.begin
    totals_ns: dict[Bucket, int] = {
        bucket: _sum(length_ns[claims.code == code]) for bucket, code in CODES.items()
    }
    result = TimeAccount(
        begin_ns=begin_ns, end_ns=end_ns, seats=seats, totals_ns=totals_ns, claims=claims, seat=lane
    )
    _check(result)
    return result


def _sum(numbers: Integers) -> int:
    """Return an exact sum, also beyond 63 bits."""
    return (int((numbers >> 32).sum()) << 32) + int((numbers & 0xFFFFFFFF).sum())


def _check(result: TimeAccount) -> None:
    """Check that the spans of a lane are adjacent from begin to end, and sum to the totals."""
    (begin, end, _), seat = result.claims, result.seat
    is_first = np.ones(len(seat), np.bool_)
    is_first[1:] = seat[1:] != seat[:-1]
    expected = np.where(is_first, result.begin_ns, np.roll(end, 1))
    wrong = np.flatnonzero((begin != expected) | (end <= begin))
    if len(wrong):
        raise CorruptionError(
            f"seat {seat[wrong[0]]} is accounted twice or not at all at {expected[wrong[0]]} ns"
            f" (next span: {begin[wrong[0]]} to {end[wrong[0]]} ns); the sums would be wrong and"
            " are not shown"
        )
    reached_ns = np.full(result.seats, result.begin_ns)
    np.maximum.at(reached_ns, seat, end)
    short = np.flatnonzero(reached_ns != result.end_ns)
    if len(short):
        raise CorruptionError(
            f"seat {short[0]} is accounted up to {reached_ns[short[0]]} ns of {result.end_ns} ns;"
            " the sums would be wrong and are not shown"
        )
    differ_ns = abs(sum(result.totals_ns.values()) - result.capacity_ns)
    if differ_ns > TOLERANCE_NS * result.seats:
        raise CorruptionError(
            f"the buckets differ from wall x seats by {differ_ns} ns; they are not shown"
        )
