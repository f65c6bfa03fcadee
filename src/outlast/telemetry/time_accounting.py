"""Time accounting: every nanosecond of every rank, in exactly one bucket.

    goodput = step / (wall x ranks): the share of all ranks' time that moved the model.
    ETTR = (step + eval + script) / (wall x ranks): effective training time ratio, the share that
    the job would have needed without failures, checkpoints, starts and stops.

`docs/format.md` has the exact bounds. All seats are divided at once, as arrays: the time of seat s
is moved to s x (length of the term).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from outlast.errors import CorruptionError
from outlast.events import (
    REHEARSAL,
    AttemptRefused,
    GenerationOpened,
    PhaseKind,
)
from outlast.telemetry.history.event_columns import Column, Integers
from outlast.telemetry.history.launcher_terms import (
    LauncherTerm,
    absences,
    recoveries,
    split_terms,
)
from outlast.telemetry.history.run_history import RunHistory
from outlast.telemetry.history.time_claims import (
    Claims,
    Windows,
    carve,
    claims_of,
    disjoint,
    merge,
)
from outlast.telemetry.history.undone_phases import undone_phases

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
_BY_NAME = np.argsort(np.argsort(np.array(BUCKETS)))  # place of a code in alphabetical order


class Span(NamedTuple):
    """Interval of Unix nanoseconds, the end not included, that belongs to one bucket."""

    begin_ns: int
    end_ns: int
    bucket: Bucket


TOLERANCE_NS = 1_000
BUCKET_OF_KIND: dict[PhaseKind, Bucket] = {
    "step": "step",
    "eval": "eval",
    "checkpoint": "checkpoint",
    "epoch": "script",  # what a loader would agree on by itself
    "draw": "script",
}
_OF_KIND: dict[str, Bucket] = {**BUCKET_OF_KIND}  # read from disk: a later version may write more
_PRODUCTIVE: tuple[Bucket, ...] = ("step", "eval", "script")


GROUP_NS = 1 << 62  # of the time of all seats that are divided at once
GROUP_SEATS = 4096


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


class TimeAccount(NamedTuple):
    """Account of a run's time. `totals_ns` are sums over seats; they add up to wall x seats."""

    begin_ns: int
    end_ns: int
    lanes: tuple[RankLane, ...]
    totals_ns: dict[Bucket, int]

    @property
    def wall_ns(self) -> int:
        """Wall time from begin to end."""
        return self.end_ns - self.begin_ns

    @property
    def capacity_ns(self) -> int:
        """Wall time multiplied by the number of seats."""
        return self.wall_ns * len(self.lanes)

    @property
    def goodput(self) -> float:
        """Share of the capacity spent in committed steps."""
        return self.totals_ns["step"] / self.capacity_ns if self.capacity_ns else 0.0

    @property
    def ettr(self) -> float:
        """Share of the capacity in productive buckets (effective training time ratio)."""
        productive_ns = sum(self.totals_ns[bucket] for bucket in _PRODUCTIVE)
        return productive_ns / self.capacity_ns if self.capacity_ns else 0.0


class _Acts(NamedTuple):
    """Phases and attempts of a term, by seat and begin, from which its time is derived."""

    seat: Column
    begin: Column
    end: Column
    worker: Column  # in alphabetical order
    code: Column
    is_refused: Column

    def chosen(self, which: Column | slice) -> _Acts:
        """Return those of a mask, of indices or of a slice."""
        return _Acts(*(column[which] for column in self))

    def ordered(self, *later: Column) -> _Acts:
        """Return them by seat and begin; `later`: keys for those of one begin, the first last."""
        order = np.lexsort((self.begin, self.seat))
        own = self.chosen(order)
        same = (own.seat[1:] == own.seat[:-1]) & (own.begin[1:] == own.begin[:-1])
        if same.any():
            return self.chosen(np.lexsort((*later, self.begin, self.seat)))
        return own


def account(history: RunHistory, *, running: bool = False) -> TimeAccount:
    """Divide a run's time into buckets; it is finished, live (`running`) or dead, over all terms.

    In a term without an end, the time after a seat's last commit is lost; in one that is `running`
    it is still unknown, so that the account ends before it. Raises RunDirError when no RunStarted
    is there, and CorruptionError when the sums differ from wall x seats by more than a microsecond
    a seat.
    """
    terms = split_terms(history, running=running)
    seats = max(term.started.world for term in terms)
    is_undone = _rolled_back(history, terms)
    parts: list[tuple[Claims, Integers]] = []
    for index, term in enumerate(terms):
        if index and terms[index - 1].end_ns < term.started.t_ns:
            edges = (terms[index - 1].end_ns, term.started.t_ns)
            window = Windows(*(np.full(seats, edge) for edge in edges))
            parts.append((claims_of(window, CODES["down"]), np.arange(seats)))
        if term.started.t_ns < term.end_ns:
            undone = is_undone[term.first_phase : term.first_phase + len(term.phases.t_ns)]
            parts += _divide(term, _acts(history, term, seats, undone), seats)
    lanes, totals_ns = _lanes(parts, seats)
    result = TimeAccount(terms[0].started.t_ns, terms[-1].end_ns, lanes, totals_ns)
    _check(result)
    return result


def _rolled_back(history: RunHistory, terms: Sequence[LauncherTerm]) -> NDArray[np.bool_]:
    """Return which phases were undone by a generation that opened before them."""
    opened = [
        (history.phases_before(term.first + index), event.n)
        for term in terms
        for index, event in enumerate(term.events)
        if isinstance(event, GenerationOpened)
    ]
    return undone_phases(history.phases, terms[0].first_phase, opened)


def _acts(history: RunHistory, term: LauncherTerm, seats: int, undone: NDArray[np.bool_]) -> _Acts:
    """Return phases and attempts by seat and begin. Rehearsals are part of the start."""
    attempts = [
        event
        for event in term.events
        if isinstance(event, AttemptRefused) and 0 <= event.seat < seats
    ]
    names = sorted({*history.workers, *(event.worker for event in attempts)})
    numbers = {name: number for number, name in enumerate(names)}
    workers = np.array([numbers[name] for name in history.workers], np.int64)
    buckets = np.array([CODES[_OF_KIND.get(kind, "script")] for kind in history.kinds], np.uint8)
    phases = term.phases
    code = np.where(undone, np.uint8(CODES["lost"]), buckets[phases.kind])
    columns = (phases.seat, phases.begin_ns, phases.t_ns, workers[phases.worker], code)
    acts = _Acts(*columns, np.zeros(len(code), np.bool_))
    is_own = (acts.seat >= 0) & (acts.seat < seats)
    acts = acts if is_own.all() else acts.chosen(is_own)
    if attempts:
        rows = [
            (
                event.seat,
                event.t_begin_ns,
                event.t_ns,
                numbers[event.worker],
                CODES["start" if event.reason == REHEARSAL else "lost"],
                event.reason != REHEARSAL,
            )
            for event in attempts
        ]
        added = zip(acts, zip(*rows, strict=True), strict=True)
        acts = _Acts(*(np.append(own, np.array(more, own.dtype)) for own, more in added))
    return acts.ordered(acts.is_refused, _BY_NAME[acts.code], acts.worker, acts.end)


def _divide(term: LauncherTerm, acts: _Acts, seats: int) -> Iterator[tuple[Claims, Integers]]:
    """Yield the time of the term, and the seats that it is of, for groups of seats."""
    group = max(1, min(GROUP_SEATS, GROUP_NS // (term.end_ns - term.started.t_ns) - 1))
    windows = recoveries(term)
    closed = Windows(*(np.array([one[at] for one in windows], np.int64) for at in (0, 1)))
    empty = np.array(absences(term), np.int64).reshape(-1, 3)
    for first in range(0, seats, group):
        count = min(group, seats - first)
        begin, end = np.searchsorted(acts.seat, (first, first + count))
        own = acts.chosen(slice(begin, end))
        own = own._replace(seat=own.seat - first)
        away = empty[(empty[:, 2] >= first) & (empty[:, 2] < first + count)] - (
            0,
            0,
            first,
        )
        claims, lane = _DividedSeats(term, own, count, closed, away).claims()
        yield claims, lane + first


class _DividedSeats:
    """The term of some seats: absences first, then discarded attempts, recoveries, and phases.

    Time that none of them claims is explained by its neighbours. `moved`: times of a seat, moved to
    its place.
    """

    def __init__(
        self,
        term: LauncherTerm,
        acts: _Acts,
        count: int,
        recoveries: Windows,
        absences: NDArray[np.int64],
    ) -> None:
        self._begin_ns, self._end_ns = term.started.t_ns, term.end_ns
        self._length_ns = self._end_ns - self._begin_ns
        self._has_ended = term.ended is not None
        self._acts, self._count = acts, count
        self._recoveries, self._absences = recoveries, absences

    def _moved(self, t_ns: Integers, seat: Integers) -> Integers:
        cut = np.clip(t_ns, self._begin_ns, self._end_ns)
        return cut - self._begin_ns + seat * self._length_ns

    def _claims(self, begin: Integers, end: Integers, seat: Integers, code: object) -> Claims:
        codes = np.full(len(seat), code, np.uint8)
        return disjoint(Claims(self._moved(begin, seat), self._moved(end, seat), codes))

    def claims(self) -> tuple[Claims, Integers]:
        """Return the time of all seats by seat and begin, and the seats."""
        acts, every = self._acts, np.arange(self._count)
        free = Windows(every * self._length_ns, (every + 1) * self._length_ns)
        order = np.lexsort((self._absences[:, 0], self._absences[:, 2]))
        begin, end, seat = self._absences[order].T
        away, free = carve(free, self._claims(begin, end, seat, CODES["absent"]))
        refused = acts.chosen(acts.is_refused)
        claims = self._claims(refused.begin, refused.end, refused.seat, CODES["lost"])
        lost, free = carve(free, claims)
        seat = np.repeat(every, len(self._recoveries.begin))
        begin, end = (np.tile(times, self._count) for times in self._recoveries)
        recovery, free = carve(free, self._claims(begin, end, seat, CODES["recovery"]))
        done = acts.chosen(~acts.is_refused)
        done = done.ordered(_BY_NAME[done.code], done.end)
        claims = self._claims(done.begin, done.end, done.seat, done.code)
        phases, free = carve(free, claims)
        parts = [away, lost, recovery, phases, Claims(*free, self._gaps(free))]
        joined = Claims(*map(np.concatenate, zip(*parts, strict=True)))
        joined = joined.chosen(np.argsort(joined.begin, kind="stable"))
        seat = joined.begin // self._length_ns
        back_ns = self._begin_ns - seat * self._length_ns
        return Claims(joined.begin + back_ns, joined.end + back_ns, joined.code), seat

    def _gaps(self, gaps: Windows) -> NDArray[np.uint8]:
        """Return the buckets of the time that nothing claims."""
        acts = self._acts
        if not len(gaps.begin):
            return np.empty(0, np.uint8)
        seat = gaps.begin // self._length_ns
        back_ns = self._begin_ns - seat * self._length_ns
        closed = self._recoveries.begin
        first_closed_ns = int(closed.min()) if len(closed) else self._end_ns
        is_closed = np.isin(gaps.end + back_ns, closed)
        begins = self._moved(acts.begin, acts.seat)
        after = np.searchsorted(begins, gaps.end)
        edges = np.searchsorted(acts.seat, np.arange(self._count + 1))
        has_before, has_after = after > edges[seat], after < edges[seat + 1]
        worker = np.append(acts.worker, -1)
        is_same = worker[after - 1] == worker[after]
        # Between two workers of the seat: until the failure its old worker was in an unreported
        # attempt; after it the new one prepares.
        code = np.where(is_closed, CODES["lost"], CODES["recovery"])
        code[is_same] = CODES["script"]
        is_stop = np.logical_and(self._has_ended, ~is_closed)
        code = np.where(has_after, code, np.where(is_stop, CODES["stop"], CODES["lost"]))
        early = gaps.begin + back_ns < first_closed_ns
        before = np.where(early, CODES["start"], CODES["recovery"])
        return np.where(has_before, code, before).astype(np.uint8)


def _lanes(
    parts: Sequence[tuple[Claims, Integers]], seats: int
) -> tuple[tuple[RankLane, ...], dict[Bucket, int]]:
    """Return the lanes of all seats, and the totals."""
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
    edges = np.searchsorted(lane, np.arange(seats + 1))
    lanes = (claims.chosen(slice(*edges[seat : seat + 2])) for seat in range(seats))
    return tuple(RankLane(seat, own) for seat, own in enumerate(lanes)), totals_ns


def _sum(numbers: Integers) -> int:
    """Return an exact sum, also beyond 63 bits."""
    return (int((numbers >> 32).sum()) << 32) + int((numbers & 0xFFFFFFFF).sum())


def _check(result: TimeAccount) -> None:
    """Check that the spans of a lane are adjacent from begin to end, and sum to the totals."""
    for lane in result.lanes:
        begin, end, _ = lane.claims
        expected = np.append(result.begin_ns, end[:-1]) if len(end) else begin
        wrong = np.flatnonzero((begin != expected) | (end <= begin))
        if len(wrong):
            raise CorruptionError(
                f"seat {lane.seat} is accounted twice or not at all at {expected[wrong[0]]} ns"
                f" (next span: {lane.spans[wrong[0]]}); the sums would be wrong and are not shown"
            )
        at_ns = int(end[-1]) if len(end) else result.begin_ns
        if at_ns != result.end_ns:
            raise CorruptionError(
                f"seat {lane.seat} is accounted up to {at_ns} ns of {result.end_ns} ns;"
                " the sums would be wrong and are not shown"
            )
    differ_ns = abs(sum(result.totals_ns.values()) - result.capacity_ns)
    if differ_ns > TOLERANCE_NS * len(result.lanes):
        raise CorruptionError(
            f"the buckets differ from wall x seats by {differ_ns} ns; they are not shown"
        )
