"""Updates of progress and incidents by many phases at once.

Each is equal to taking the same PhaseDone events one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from outlast.controller.recovery.recovery_policy import FROM_A_COPY
from outlast.events import (
    AnyEvent,
    AttemptRefused,
    FaultInjected,
    GenerationOpened,
    Noticed,
    PhaseDone,
    RunEnded,
    RunStarted,
)
from outlast.telemetry.history.event_columns import PhaseColumns, rows
from outlast.telemetry.history.incident_course import Incident, IncidentCourse, StateBefore
from outlast.telemetry.history.run_history import RunHistory
from outlast.telemetry.incidents import Tracker
from outlast.telemetry.job_progress import (
    REMEMBERED,
    CommittedProgress,
    LoopPlace,
    ProgressTrail,
    VisitedPlace,
)

_AFTER_PHASES = (RunStarted, Noticed, GenerationOpened, AttemptRefused, FaultInjected, RunEnded)


class IncidentReader:
    """Incidents of a run that is read on.

    They change with an event, by a phase before their end, and while one is open.
    """

    def __init__(self) -> None:
        self._settled_ns = 0
        self._state: tuple[int, int] | None = None  # events, and phases until then
        self._found: list[Incident] = []

    def read(self, history: RunHistory) -> list[Incident]:
        """Return all incidents of the history so far, in order."""
        if self._state is None or self._state != self._state_of(history):
            tracker = _tracked(history)
            self._found = tracker.found()
            current, events = tracker.current, history.events
            is_open = current is not None and current.state == "open"
            ends_ns = (events[-1].t_ns if events else 0, current.at_ns if current else 0)
            self._settled_ns = max(ends_ns)
            self._state = None if is_open else self._state_of(history)
        return self._found

    def _state_of(self, history: RunHistory) -> tuple[int, int]:
        return len(history.events), history.phases_until(self._settled_ns)


def incidents(history: RunHistory) -> list[Incident]:
    """Return all incidents of a run, in order."""
    return _tracked(history).found()


def _tracked(history: RunHistory) -> Tracker:
    tracker = Tracker()
    done = 0
    for index, event in enumerate(history.events):
        if _needs_phases(tracker, event):
            before = history.phases_before(index)
            _take(tracker, history, slice(done, before))
            done = before
        tracker.take(event)
    _take(tracker, history, slice(done, None))
    return tracker


def _needs_phases(tracker: Tracker, event: AnyEvent) -> bool:
    """Return whether the phases before an event have to be taken before it; else both orders are
    equal."""
    current = tracker.current
    is_redo = current is not None and current.state == "open" and current.opened is not None
    return is_redo or isinstance(event, _AFTER_PHASES)


def _take(tracker: Tracker, history: RunHistory, which: slice) -> None:
    phases = rows(history.phases, which)
    if not len(phases.n):
        return
    if tracker.current is not None and tracker.current.state == "open":
        _advance(tracker.current, phases, history.kinds)
    _go_on(tracker.before, phases, history)


def reach(progress: CommittedProgress, phases: PhaseColumns) -> None:
    """Update the progress of all seats."""
    is_known = (phases.seat >= 0) & (phases.seat < progress.world)
    known = phases if is_known.all() else rows(phases, is_known)
    seat, n, step = known.seat, known.n, known.step
    farthest = np.full(progress.world, np.iinfo(np.int64).min)
    np.maximum.at(farthest, seat, n)
    newest = n == farthest[seat]
    places = zip(*(each[newest].tolist() for each in (seat, n, step)), strict=True)
    for own, own_n, own_step in places:
        progress.reach(own, LoopPlace(own_n, own_step))


def _remember(trail: ProgressTrail, phases: PhaseColumns, kinds: Sequence[str]) -> None:
    """Remember the newest phases. `kinds`: by number."""
    tail = 4 * REMEMBERED
    while True:
        found, newest = np.unique(phases.n[::-1][:tail], return_index=True)
        if len(found) >= REMEMBERED or tail >= len(phases.n):
            break
        tail *= 8
    last = len(phases.n) - 1 - np.sort(newest)[:REMEMBERED][::-1]
    columns = (phases.n, phases.kind, phases.step)
    for n, kind, step in zip(*(each[last].tolist() for each in columns), strict=True):
        trail.remember(n, VisitedPlace(kinds[int(kind)], step))


def _go_on(before: StateBefore, phases: PhaseColumns, history: RunHistory) -> None:
    """Update the state of the run outside of incidents."""
    reach(before.reached, phases)
    _remember(before.trail, phases, history.kinds)
    if before.injected_ns:
        for number in np.unique(phases.worker).tolist():
            before.injected_ns.pop(history.workers[int(number)], None)


def _advance(course: IncidentCourse, phases: PhaseColumns, kinds: Sequence[str]) -> None:
    """Update an incident until it ends."""
    if course.opened is None:
        _remember(course.trail, phases, kinds)
        reach(course.reached, phases)
        return
    firsts = _first_rows(phases, phases.n >= course.target, course.waiting)
    is_over = bool(course.waiting) and len(firsts) == len(course.waiting)
    if is_over:
        phases = rows(phases, slice(max(firsts.values()) + 1))
    if course.decided is None or course.decided.rung not in FROM_A_COPY:
        _remember(course.trail, phases, kinds)
    _regain(course, phases)
    if firsts:
        until_ns = max(course.at_ns, int(phases.t_ns[max(firsts.values())]))
        course.ns["redo"] += until_ns - course.at_ns
        course.at_ns, course.last = until_ns, PhaseDone
        course.waiting -= firsts.keys()
    if is_over:
        course.finish()


def _regain(course: IncidentCourse, phases: PhaseColumns) -> None:
    """Note when all present seats are back at the phase that all had reached before."""
    if course.regained_ns:
        return
    is_back = phases.n >= course.reached.n
    missing = course.present - course.regained
    firsts = _first_rows(phases, is_back, missing)
    course.regained.update(np.unique(phases.seat[is_back]).tolist())
    if len(firsts) == len(missing):
        is_back[: max(firsts.values(), default=0)] = False
        times_ns = phases.t_ns[is_back]
        course.regained_ns = int(times_ns[times_ns != 0][0]) if times_ns.any() else 0


def _first_rows(
    phases: PhaseColumns, which: NDArray[np.bool_], seats: Collection[int]
) -> dict[int, int]:
    """Return the first row of each of these seats among the phases of a mask."""
    chosen = np.flatnonzero(which)
    found, first = np.unique(phases.seat[chosen], return_index=True)
    firsts = zip(found.tolist(), chosen[first].tolist(), strict=True)
    return {seat: row for seat, row in firsts if seat in seats}
