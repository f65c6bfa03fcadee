"""Terms of a run's launchers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from outlast.errors import RunDirError
from outlast.events import (
    AnyEvent,
    AttemptRefused,
    Decided,
    GenerationClosed,
    GenerationOpened,
    Note,
    RunEnded,
    RunStarted,
)
from outlast.telemetry.history.event_columns import PhaseColumns, newest_rows, rows
from outlast.telemetry.history.run_history import RunHistory


class LauncherTerm(NamedTuple):
    """Life of one launcher. `events`, `phases`: its part of the history.

    `ended`: it recorded its end; else the term ends at its last event, or while it runs at the last
    phase or attempt of the slowest seat. `first`: the place of its first event in the history;
    `first_phase`: of its first phase.
    """

    started: RunStarted
    begin_ns: int
    end_ns: int
    ended: RunEnded | None
    events: Sequence[AnyEvent]
    phases: PhaseColumns
    first: int
    first_phase: int


def split_terms(history: RunHistory, *, running: bool = False) -> list[LauncherTerm]:
    """Return the terms of the launchers in order; the last one may be `running`.

    Events before the first RunStarted are in no term.
    """
    events = history.events
    starts = [index for index, event in enumerate(events) if isinstance(event, RunStarted)]
    if not starts:
        raise RunDirError(
            "the events hold no start of a run: the launcher's own segment is missing or damaged;"
            " nothing can be accounted"
        )
    phases_at = [*map(history.phases_before, starts), len(history.phases.t_ns)]
    metrics_at = [*map(history.metrics_before, starts), len(history.metrics.t_ns)]
    terms: list[LauncherTerm] = []
    for number, (index, following) in enumerate(
        zip(starts, [*starts[1:], len(events)], strict=True)
    ):
        started = events[index]
        assert isinstance(started, RunStarted)
        own = events[index:following]
        begin, end = phases_at[number : number + 2]
        phases = rows(history.phases, slice(begin, end))
        times_ns = history.metrics.t_ns[metrics_at[number] : metrics_at[number + 1]]
        ended = next((event for event in reversed(own) if isinstance(event, RunEnded)), None)
        last_ns = max([_last_ns(own), *(int(t[-1]) for t in (phases.t_ns, times_ns) if len(t))])
        is_alive = running and following == len(events)
        end_ns = ended.t_ns if ended else last_ns
        if is_alive and ended is None:
            end_ns = _known_until_ns(started, own, phases, last_ns)
        terms.append(LauncherTerm(started, started.t_ns, end_ns, ended, own, phases, index, begin))
    return terms


def _last_ns(own: Sequence[AnyEvent]) -> int:
    """Return the time of a launcher's last event other than notes: those of the next one may come
    before its RunStarted."""
    return next(e.t_ns for e in reversed(own) if not (isinstance(e, Note) and not e.worker))


def _known_until_ns(
    started: RunStarted, own: Sequence[AnyEvent], phases: PhaseColumns, last_ns: int
) -> int:
    """Return the time up to which every seat's use of time is known."""
    opened_ns: int | None = None
    for event in own:
        if isinstance(event, GenerationOpened):
            opened_ns = event.t_ns
        elif isinstance(event, GenerationClosed):
            opened_ns = None
    if opened_ns is None:  # starting, or in a recovery: each moment of which is known
        return last_ns
    newest = newest_rows(phases, started.world)
    ends_ns = np.where(newest >= 0, np.append(phases.t_ns, 0)[newest], opened_ns)
    for event in own:
        if isinstance(event, AttemptRefused) and 0 <= event.seat < started.world:
            ends_ns[event.seat] = max(ends_ns[event.seat], event.t_ns)
    # The time of a rank without a worker is known until the next opening.
    present = np.setdiff1d(np.arange(started.world), absent_now(own))
    return max(opened_ns, int(ends_ns[present].min())) if len(present) else opened_ns


def absent_now(events: Sequence[AnyEvent]) -> tuple[int, ...]:
    """Return the seats that the last decision left without a worker."""
    return next((e.absent for e in reversed(events) if isinstance(e, Decided)), ())


def recoveries(term: LauncherTerm) -> list[tuple[int, int]]:
    """Return spans from a generation's end to the next one's start, or to the term's end."""
    windows: list[tuple[int, int]] = []
    closed_ns: int | None = None
    for event in term.events:
        if isinstance(event, GenerationClosed):
            closed_ns = event.t_ns if closed_ns is None else closed_ns
        elif isinstance(event, GenerationOpened) and closed_ns is not None:
            windows.append((closed_ns, event.t_ns))
            closed_ns = None
    if closed_ns is not None:
        windows.append((closed_ns, max(closed_ns, term.end_ns)))
    return windows


def absences(term: LauncherTerm) -> list[tuple[int, int, int]]:
    """Return begin, end and seat of generations that were open without that seat."""
    found: list[tuple[int, int, int]] = []
    absent: tuple[int, ...] = ()
    since_ns = term.end_ns
    for event in (*term.events, None):
        if isinstance(event, Decided):
            absent = event.absent
        elif isinstance(event, GenerationOpened):
            since_ns = event.t_ns
        elif event is None or isinstance(event, GenerationClosed):
            end_ns = event.t_ns if event else term.end_ns
            found += [(since_ns, end_ns, seat) for seat in absent if since_ns < end_ns]
            since_ns = term.end_ns
    return found
