"""Time accounting: every nanosecond of every rank, in exactly one bucket.

    goodput = step / (wall x ranks): the share of all ranks' time that moved the model.
    ETTR = (step + eval + script) / (wall x ranks): effective training time ratio, the share that
    the job would have needed without failures, checkpoints, starts and stops.

`docs/format.md` has the exact bounds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

from outlast.errors import CorruptionError, RunDirError
from outlast.events import (
    AnyEvent,
    AttemptRefused,
    Decided,
    GenerationClosed,
    GenerationOpened,
    Note,
    PhaseDone,
    PhaseKind,
    RunEnded,
    RunStarted,
)

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
    parts: list[Span] = []
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
            parts.append(Span(begin, end, claim.bucket))
            at = end
            look += 1
        index = max(index, look - 1)
        if at < window.end_ns:
            rest.append(Window(at, window.end_ns))
    return parts, rest


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


TOLERANCE_NS = 1_000
REHEARSAL = "rehearsal"  # the reason of attempts that are refused on purpose, before the first step
BUCKET_OF_KIND: dict[PhaseKind, Bucket] = {
    "step": "step",
    "eval": "eval",
    "checkpoint": "checkpoint",
    "epoch": "script",  # what a loader would agree on by itself
    "draw": "script",
}
_OF_KIND: dict[str, Bucket] = {**BUCKET_OF_KIND}  # read from disk: a later version may write more
_PRODUCTIVE: tuple[Bucket, ...] = ("step", "eval", "script")


class RankLane(NamedTuple):
    """Complete time of one seat: adjacent spans, in order."""

    seat: int
    spans: tuple[Span, ...]


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


class LauncherTerm(NamedTuple):
    """Life of one launcher.

    `ended`: it recorded its end; else the term ends at its last event, or while it runs at the last
    phase or attempt of the slowest seat.
    """

    started: RunStarted
    end_ns: int
    ended: RunEnded | None
    events: Sequence[AnyEvent]

    @property
    def window(self) -> Window:
        """Window of time from the start of this launcher to its end."""
        return Window(self.started.t_ns, self.end_ns)


class _Act(NamedTuple):
    """A phase or an attempt on one seat, from which its time is derived."""

    begin_ns: int
    end_ns: int
    worker: str
    bucket: Bucket
    refused: bool


def account(events: Sequence[AnyEvent], *, running: bool = False) -> TimeAccount:
    """Divide a run's time into buckets; it is finished, live (`running`) or dead, over all terms.

    In a term without an end, the time after a seat's last commit is lost; in one that is `running`
    it is still unknown, so that the account ends before it. Raises RunDirError when no RunStarted
    is there, and CorruptionError when the sums differ from wall x seats by more than a microsecond
    a seat.
    """
    terms = split_terms(events, running=running)
    seats = max(term.started.world for term in terms)
    rolled_back = _rolled_back(terms)
    spans: list[list[Span]] = [[] for _ in range(seats)]
    for index, term in enumerate(terms):
        if index:
            down = Span(terms[index - 1].end_ns, term.started.t_ns, "down")
            for lane in spans:
                lane.append(down)
        acts = _acts(term, seats, rolled_back)
        recoveries = _recoveries(term)
        absences = _absences(term)
        for seat in range(seats):
            spans[seat] += _divide(term, acts[seat], recoveries, absences.get(seat, []))
    lanes = tuple(
        RankLane(seat, tuple(merge(span for span in lane if span.begin_ns < span.end_ns)))
        for seat, lane in enumerate(spans)
    )
    result = TimeAccount(terms[0].started.t_ns, terms[-1].end_ns, lanes, _totals(lanes))
    _check(result)
    return result


def split_terms(events: Sequence[AnyEvent], *, running: bool = False) -> list[LauncherTerm]:
    """Return the terms of the launchers in order; the last one may be `running`.

    Events before the first RunStarted are in no term.
    """
    ordered = sorted(events, key=lambda event: event.t_ns)
    starts = [index for index, event in enumerate(ordered) if isinstance(event, RunStarted)]
    if not starts:
        raise RunDirError(
            "the events hold no start of a run: the launcher's own segment is missing or damaged;"
            " nothing can be accounted"
        )
    terms: list[LauncherTerm] = []
    for index, following in zip(starts, [*starts[1:], len(ordered)], strict=True):
        started = ordered[index]
        assert isinstance(started, RunStarted)
        own = ordered[index:following]
        ended = next((event for event in reversed(own) if isinstance(event, RunEnded)), None)
        alive = running and following == len(ordered)
        end_ns = ended.t_ns if ended else _known_until_ns(own) if alive else _last_ns(own)
        terms.append(LauncherTerm(started, end_ns, ended, own))
    return terms


def _last_ns(own: Sequence[AnyEvent]) -> int:
    """Return the time of a launcher's last event other than notes: those of the next one may come
    before its RunStarted."""
    return next(e.t_ns for e in reversed(own) if not (isinstance(e, Note) and not e.worker))


def _known_until_ns(own: Sequence[AnyEvent]) -> int:
    """Return the time up to which every seat's use of time is known."""
    ends_ns: dict[int, int] = {}
    opened_ns: int | None = None
    for event in own:
        if isinstance(event, PhaseDone | AttemptRefused):
            ends_ns[event.seat] = event.t_ns
        elif isinstance(event, GenerationOpened):
            opened_ns = event.t_ns
        elif isinstance(event, GenerationClosed):
            opened_ns = None
    if opened_ns is None:  # starting, or in a recovery: each moment of which is known
        return _last_ns(own)
    seats = range(own[0].world) if isinstance(own[0], RunStarted) else ends_ns
    return max(opened_ns, min(ends_ns.get(seat, opened_ns) for seat in seats))


def _rolled_back(terms: list[LauncherTerm]) -> set[int]:
    """Return the ids of phases that were committed and then undone: a generation that opens at n
    undoes every later phase done before."""
    done: dict[int, list[PhaseDone]] = {}
    undone: set[int] = set()
    for term in terms:
        for event in term.events:
            if isinstance(event, PhaseDone):
                done.setdefault(event.seat, []).append(event)
            elif isinstance(event, GenerationOpened):
                for stack in done.values():
                    while stack and stack[-1].n > event.n:
                        undone.add(id(stack.pop()))
    return undone


def _acts(term: LauncherTerm, seats: int, rolled_back: set[int]) -> list[list[_Act]]:
    """Return phases and attempts by seat, by time. Rehearsals are part of the start."""
    acts: list[list[_Act]] = [[] for _ in range(seats)]
    for event in term.events:
        if not isinstance(event, PhaseDone | AttemptRefused):
            continue
        if not 0 <= event.seat < seats:
            continue
        refused = isinstance(event, AttemptRefused)
        reason = event.reason if isinstance(event, AttemptRefused) else ""
        if reason == REHEARSAL:
            refused, bucket = False, "start"
        elif refused or id(event) in rolled_back:
            bucket = "lost"
        else:
            bucket = _OF_KIND.get(event.kind, "script")
        acts[event.seat].append(_Act(event.t_begin_ns, event.t_ns, event.worker, bucket, refused))
    for seat_acts in acts:
        seat_acts.sort()
    return acts


def _recoveries(term: LauncherTerm) -> list[Window]:
    """Return spans from a generation's end to the next one's start, or to the term's end."""
    windows: list[Window] = []
    closed_ns: int | None = None
    for event in term.events:
        if isinstance(event, GenerationClosed):
            closed_ns = event.t_ns if closed_ns is None else closed_ns
        elif isinstance(event, GenerationOpened) and closed_ns is not None:
            windows.append(Window(closed_ns, event.t_ns))
            closed_ns = None
    if closed_ns is not None:
        windows.append(Window(closed_ns, max(closed_ns, term.end_ns)))
    return windows


def _absences(term: LauncherTerm) -> dict[int, list[Span]]:
    """Return by seat the spans of generations that were open without it."""
    found: dict[int, list[Span]] = {}
    absent: tuple[int, ...] = ()
    since_ns = term.end_ns
    for event in (*term.events, None):
        if isinstance(event, Decided):
            absent = event.absent
        elif isinstance(event, GenerationOpened):
            since_ns = event.t_ns
        elif event is None or isinstance(event, GenerationClosed):
            end_ns = event.t_ns if event else term.end_ns
            for seat in absent if since_ns < end_ns else ():
                found.setdefault(seat, []).append(Span(since_ns, end_ns, "absent"))
            since_ns = term.end_ns
    return found


def _divide(
    term: LauncherTerm, acts: list[_Act], recoveries: list[Window], absences: list[Span]
) -> list[Span]:
    """Divide one seat's term: absences first, then discarded attempts, recoveries, and phases. Time
    that none of them claims is explained by its neighbours."""
    free = [term.window] if term.started.t_ns < term.end_ns else []
    away, free = carve(free, absences)
    claims = [Span(act.begin_ns, act.end_ns, "lost") for act in acts if act.refused]
    lost, free = carve(free, claims)
    recovery, free = carve(free, (Span(*window, "recovery") for window in recoveries))
    claims = [Span(act.begin_ns, act.end_ns, act.bucket) for act in acts if not act.refused]
    done, free = carve(free, claims)
    begins = [act.begin_ns for act in acts]
    closed = {window.begin_ns for window in recoveries}
    first_closed_ns = min(closed, default=term.end_ns)
    gaps: list[Span] = []
    for gap in free:
        index = bisect_left(begins, gap.end_ns)
        before = acts[index - 1] if index else None
        after = acts[index] if index < len(acts) else None
        if before is None:
            bucket: Bucket = "start" if gap.begin_ns < first_closed_ns else "recovery"
        elif after is None:
            bucket = "stop" if term.ended and gap.end_ns not in closed else "lost"
        elif before.worker == after.worker:
            bucket = "script"
        else:
            # The seat has a new worker. Until the failure its old worker was in an unreported
            # attempt; after it the new one prepares.
            bucket = "lost" if gap.end_ns in closed else "recovery"
        gaps.append(Span(*gap, bucket))
    return sorted(away + lost + recovery + done + gaps)


def _totals(lanes: Sequence[RankLane]) -> dict[Bucket, int]:
    totals: dict[Bucket, int] = dict.fromkeys(BUCKETS, 0)
    for lane in lanes:
        for span in lane.spans:
            totals[span.bucket] += span.end_ns - span.begin_ns
    return totals


def _check(result: TimeAccount) -> None:
    """Check that the spans of a lane are adjacent from begin to end, and sum to the totals."""
    for lane in result.lanes:
        at_ns = result.begin_ns
        for span in lane.spans:
            if span.begin_ns != at_ns or span.end_ns <= at_ns:
                raise CorruptionError(
                    f"seat {lane.seat} is accounted twice or not at all at {at_ns} ns"
                    f" (next span: {span}); the sums would be wrong and are not shown"
                )
            at_ns = span.end_ns
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
