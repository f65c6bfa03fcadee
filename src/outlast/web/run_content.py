"""Content of a run's page, and the reading of the run that keeps it up to date."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outlast.errors import RunDirError, UsageError
from outlast.events import (
    AnyEvent,
    CheckpointSaved,
    Drained,
    Warned,
    WorkerLost,
    WorkerSeated,
    WorkerSpawned,
)
from outlast.plan.model.measured_run import measure_run
from outlast.telemetry.event_store import EventReader, Life, life_of
from outlast.telemetry.history.event_columns import Integers, last_of_each
from outlast.telemetry.history.growing_account import (
    COLUMNS_MAX,
    ROWS_MAX,
    DrawnAccount,
    GrowingAccount,
    drawn_account,
)
from outlast.telemetry.history.incident_course import Incident
from outlast.telemetry.history.phase_blocks import IncidentReader, incidents
from outlast.telemetry.history.run_history import RunHistory
from outlast.telemetry.history.time_buckets import TimeAccount, TimeTotals
from outlast.telemetry.incident_explanation import story
from outlast.telemetry.job_progress import changed_findings
from outlast.telemetry.run_summary import RunSummary, summarise_history
from outlast.telemetry.segment_files import SegmentDamage, segment_paths
from outlast.telemetry.time_accounting import account
from outlast.web.planner_link import predicted_sentence
from outlast.web.run_answers import (
    PageAnswer,
    StepTimes,
    answers,
    incidents_figure,
    step_times,
    steps_figure,
)

REFRESH_S = 1.0
SHARE = 20  # a page is computed anew after this many times its own computation
FINE_COLUMNS_MAX, FINE_CELLS = 4800, 64_000  # of rows and columns, at most 20 bytes each


class WorkerLine(NamedTuple):
    """A worker of the run. `rank` is -1 for a spare."""

    worker: str
    rank: int
    host: str
    pid: int
    lost: str  # what ended it; "": it lives


class IncidentStory(NamedTuple):
    """An incident, and its story as labels and texts."""

    incident: Incident
    rows: list[tuple[str, str]]


class LossCurve(NamedTuple):
    """Losses over time and by step."""

    t_ns: Integers
    loss: NDArray[np.float64]
    step: Integers


class RunContent(NamedTuple):
    """Everything that the page of a run shows. `totals`: of the run; `times`: of what is drawn."""

    summary: RunSummary
    life: Life
    now_ns: int
    answers: tuple[PageAnswer, ...]
    totals: TimeTotals
    times: DrawnAccount
    stories: list[IncidentStory]
    steps: StepTimes
    loss: LossCurve
    saved: list[CheckpointSaved]
    drained: list[Drained]
    workers: list[WorkerLine]
    findings: list[Warned]
    events: int


class RunSums(NamedTuple):
    """Account and incidents of a run, which new events extend."""

    account: GrowingAccount
    incidents: IncidentReader


def content(
    history: RunHistory,
    run_dir: Path,
    damages: Sequence[SegmentDamage] = (),
    *,
    now_ns: int,
    life: Life,
    price_per_hour: float = 0.0,
    predicted: str = "",
    sums: RunSums | None = None,
) -> RunContent:
    """Compute the content from the history of a run.

    `predicted`: sentence on what the planner has for it; `sums`: of it, as it was read before.

    Raises CorruptionError when the times do not add up, RunDirError without a start.
    """
    events = history.events
    sums = sums or RunSums(GrowingAccount(), IncidentReader())
    times = sums.account.read(history, running=life == "running")
    found = sums.incidents.read(history)
    summary = summarise_history(
        history, run_dir, damages, life=life, times=times.totals, run_incidents=found
    )
    steps = step_times(history)
    return RunContent(
        summary=summary,
        life=life,
        now_ns=now_ns,
        answers=answers(
            events,
            summary,
            found,
            steps,
            now_ns=now_ns,
            life=life,
            price_per_hour=price_per_hour,
            predicted=predicted,
        ),
        totals=times.totals,
        times=times,
        stories=[IncidentStory(incident, story(incident, life)) for incident in found],
        steps=steps,
        loss=_losses(history),
        saved=[event for event in events if isinstance(event, CheckpointSaved)],
        drained=[event for event in events if isinstance(event, Drained)],
        workers=_workers(events),
        findings=list(changed_findings(events)),
        events=history.count,
    )


def _losses(history: RunHistory) -> LossCurve:
    """Return the losses of the lowest rank that reports one, of each step the last."""
    reported = history.losses()
    newest = last_of_each(reported.step)
    return LossCurve(reported.t_ns[newest], reported.loss[newest], reported.step[newest])


def _workers(events: Sequence[AnyEvent]) -> list[WorkerLine]:
    lines: dict[str, WorkerLine] = {}
    for event in events:
        if isinstance(event, WorkerSpawned):
            lines[event.worker] = WorkerLine(event.worker, event.seat, event.host, event.pid, "")
        elif isinstance(event, WorkerSeated) and event.worker in lines:
            lines[event.worker] = lines[event.worker]._replace(rank=event.seat)
        elif isinstance(event, WorkerLost) and event.worker in lines:
            lost = event.fault.detail or event.fault.kind
            lines[event.worker] = lines[event.worker]._replace(lost=lost)
    return sorted(lines.values(), key=lambda line: (bool(line.lost), line.rank < 0, line.rank))


class RunOverview(NamedTuple):
    """Line of a run in the index. `steps`, `incidents`: as on its page."""

    summary: RunSummary
    steps: str
    incidents: str


class RunReading:
    """History of one run, read on at each refresh; several threads may ask for its content."""

    def __init__(self, run_dir: Path, price_per_hour: float = 0.0) -> None:
        self.run_dir = run_dir
        self._price_per_hour = price_per_hour
        self._forget()
        self._overview: RunOverview | None = None
        self._overview_of: tuple[object, ...] = ()
        self._content: RunContent | None = None
        self._due_s = 0.0
        self._lock = threading.Lock()

    def refresh(self) -> RunContent | None:
        """Return the content of the run as of now, at most a second old; None before its start.

        Raises RunDirError and CorruptionError as `content` does.
        """
        with self._lock:
            begin_s = time.monotonic()
            if begin_s < self._due_s:
                return self._content
            try:
                self._read_on()
            finally:  # damage is computed no more often than a page
                spent_s = time.monotonic() - begin_s
                self._due_s = begin_s + max(REFRESH_S, SHARE * spent_s)
            return self._content

    def overview(self) -> RunOverview | None:
        """Return the run's line in an index; None before its start. It costs no page.

        Raises as `refresh`. Of a run without a page, nothing but the line stays in memory; it is
        computed anew when a file of events has grown.
        """
        with self._lock:
            life = life_of(self.run_dir, self._history.events)
            where = self._reader.directory
            paths = segment_paths(where) if where.is_dir() else []
            state = (life, *((path.name, path.stat().st_size) for path in paths))
            if state != self._overview_of:
                self._overview = self._read_overview(life)
                self._overview_of = state
                if self._content is None and life != "running":
                    self._forget()
            return self._overview

    def _read_overview(self, life: Life) -> RunOverview | None:
        history = self._history
        history.read(self._reader, last=life == "died")
        if not history.count:
            return None
        life = life_of(self.run_dir, history.events)
        found = incidents(history)
        summary = summarise_history(
            history, self.run_dir, self._damages, life=life, run_incidents=found
        )
        return RunOverview(summary, steps_figure(summary), incidents_figure(found))

    def _forget(self) -> None:
        self._damages: list[SegmentDamage] = []
        self._reader = EventReader(self.run_dir, self._damages.append)
        self._history = RunHistory()
        self._sums = RunSums(GrowingAccount(), IncidentReader())
        self._predicted, self._predicted_of = "", -1
        self._divided: tuple[RunContent, TimeAccount] | None = None  # while a window is shown

    def _read_on(self) -> None:
        life = life_of(self.run_dir, self._history.events)
        damages = len(self._damages)
        new = self._history.read(self._reader, last=life == "died")
        known = self._content
        if known and not new and life == known.life and damages == len(self._damages):
            self._content = self._renewed(known)
        elif self._history.count:
            self._content = content(
                self._history,
                self.run_dir,
                self._damages,
                now_ns=time.time_ns(),
                life=life,
                price_per_hour=self._price_per_hour,
                predicted=self._predicted,
                sums=self._sums,
            )

    def _renewed(self, known: RunContent) -> RunContent:
        """Return a content as of now. No event has come since."""
        now_ns = time.time_ns()
        renewed = answers(
            self._history.events,
            known.summary,
            [story.incident for story in known.stories],
            known.steps,
            now_ns=now_ns,
            life=known.life,
            price_per_hour=self._price_per_hour,
            predicted=self._predicted,
        )
        return known._replace(now_ns=now_ns, answers=renewed)

    def window(self, begin_s: float, end_s: float) -> RunContent | None:
        """Return the content with the times and curves between two times since the run's begin.

        None before its start. Raises as `refresh`, and UsageError where the run has no such time.
        """
        known = self.refresh()
        if known is None:
            return None
        totals = known.totals
        begin_ns, end_ns = (totals.begin_ns + round(s * 1e9) for s in (begin_s, end_s))
        begin_ns, end_ns = max(begin_ns, totals.begin_ns), min(end_ns, totals.end_ns)
        if begin_ns >= end_ns:
            raise UsageError(
                f"the run has no time between {begin_s:g} and {end_s:g} s after its begin"
            )
        with self._lock:
            if self._divided is None or self._divided[0] is not known:
                self._divided = known, account(self._history, running=known.life == "running")
            times = drawn_account(self._divided[1].between(begin_ns, end_ns))
        loss, steps = known.loss, known.steps
        reported = np.flatnonzero((loss.t_ns >= begin_ns) & (loss.t_ns <= end_ns))
        done = np.flatnonzero((steps.ends_ns >= begin_ns) & (steps.ends_ns <= end_ns))
        return known._replace(
            times=times,
            loss=LossCurve(loss.t_ns[reported], loss.loss[reported], loss.step[reported]),
            steps=StepTimes(steps.ends_ns[done], steps.lasted_s[done], steps.step[done]),
        )

    def predict(self) -> str:
        """Return the prediction for the run, which its content has from now on."""
        known = self.refresh()
        with self._lock:
            if known is not None and self._predicted_of != len(self._history.events):
                times = account(self._history, running=known.life == "running")
                try:
                    measured = measure_run(self._history, times, known.summary)
                    self._predicted = predicted_sentence(measured)
                except RunDirError:  # no time has passed
                    self._predicted = ""
                self._predicted_of = len(self._history.events)
            if self._content is not None:
                self._content = self._renewed(self._content)
            return self._predicted

    def finest(self) -> RunContent | None:
        """Return the content with as fine columns as a file has room for. Raises as `refresh`."""
        self.predict()
        known = self.refresh()
        if known is None:
            return None
        whole = account(self._history, running=known.life == "running")
        rows = min(whole.seats, ROWS_MAX)
        columns_max = max(COLUMNS_MAX, min(FINE_COLUMNS_MAX, FINE_CELLS // max(1, rows)))
        return known._replace(times=drawn_account(whole, columns_max))
