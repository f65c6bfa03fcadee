"""Time accounting: every nanosecond of every rank, in exactly one bucket.

    goodput = step / (wall x ranks): the share of all ranks' time that moved the model.
    ETTR = (step + eval + script) / (wall x ranks): effective training time ratio, the share that
    the job would have needed without failures, checkpoints, starts and stops.

`docs/format.md` has the exact bounds. All seats are divided at once, as arrays: the time of seat s
is moved to s x (length of the term).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outlast.events import (
    REHEARSAL,
    AttemptRefused,
    GenerationOpened,
    PhaseKind,
)
from outlast.telemetry.history.event_columns import Column, Integers, newest_rows, rows
from outlast.telemetry.history.launcher_terms import (
    LauncherTerm,
    absences,
    recoveries,
    split_terms,
)
from outlast.telemetry.history.run_history import RunHistory
from outlast.telemetry.history.time_buckets import (
    BUCKETS,
    CODES,
    Bucket,
    TimeAccount,
    account_of,
)
from outlast.telemetry.history.time_claims import (
    Claims,
    Windows,
    carve,
    claims_of,
    disjoint,
)
from outlast.telemetry.history.undone_phases import undone_phases

_BY_NAME = np.argsort(np.argsort(np.array(BUCKETS)))  # place of a code in alphabetical order
BUCKET_OF_KIND: dict[PhaseKind, Bucket] = {
    "step": "step",
    "eval": "eval",
    "checkpoint": "checkpoint",
    "epoch": "script",  # what a loader would agree on by itself
    "draw": "script",
}
_OF_KIND: dict[str, Bucket] = {**BUCKET_OF_KIND}  # read from disk: a later version may write more
GROUP_NS = 1 << 62  # of the time of all seats that are divided at once
GROUP_SEATS = 4096


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
        if term.begin_ns < term.end_ns:
            undone = is_undone[term.first_phase : term.first_phase + len(term.phases.t_ns)]
            parts += _divide(term, _acts(history, term, seats, undone), seats)
    return account_of(parts, terms[0].started.t_ns, terms[-1].end_ns, seats)


def account_since(history: RunHistory, begin_ns: int) -> TimeAccount | None:
    """Divide the time of a running launcher from `begin_ns` on, as `account` divides it.

    `begin_ns`: an earlier end of its account, since when no event but phases and metrics has come.
    None where a rank has no phase before it: what it did until its first one is unknown.
    """
    term = split_terms(history, running=True)[-1]
    seats = term.started.world
    before = int(np.searchsorted(term.phases.t_ns, begin_ns, "right"))
    newest = newest_rows(rows(term.phases, slice(before)), seats)
    if (newest < 0).any() or term.end_ns < begin_ns:
        return None
    # Of each rank, its latest phase before; an overlapping one may have begun after it.
    nearest = np.searchsorted(term.phases.t_ns, term.phases.begin_ns[newest].min(initial=begin_ns))
    which = np.union1d(newest, np.arange(nearest, len(term.phases.t_ns)))
    term = term._replace(begin_ns=begin_ns, phases=rows(term.phases, which))
    parts: Iterable[tuple[Claims, Integers]] = ()
    if begin_ns < term.end_ns:
        acts = _acts(history, term, seats, np.zeros(len(which), np.bool_))
        parts = _divide(term, acts, seats)
    return account_of([*parts], begin_ns, term.end_ns, seats)


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
    group = max(1, min(GROUP_SEATS, GROUP_NS // (term.end_ns - term.begin_ns) - 1))
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
        self._begin_ns, self._end_ns = term.begin_ns, term.end_ns
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
