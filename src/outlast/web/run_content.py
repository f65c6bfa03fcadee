"""Content of a run's page, and the reading of the run that keeps it up to date."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outlast.errors import CorruptionError
from outlast.events import (
    AnyEvent,
    CheckpointSaved,
    Drained,
    Warned,
    WorkerLost,
    WorkerSeated,
    WorkerSpawned,
)
from outlast.telemetry.event_store import EventReader, Life, life_of
from outlast.telemetry.history.event_columns import Integers, last_of_each
from outlast.telemetry.history.growing_account import DrawnAccount, GrowingAccount
from outlast.telemetry.history.incident_course import Incident
from outlast.telemetry.history.phase_blocks import IncidentReader, incidents
from outlast.telemetry.history.run_history import RunHistory
from outlast.telemetry.incident_explanation import story
from outlast.telemetry.job_progress import changed_findings
from outlast.telemetry.run_summary import RunSummary, summarise_history
from outlast.telemetry.segment_files import SegmentDamage, segment_paths
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
LOG_BYTES = 64 << 10


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
    """Everything that the page of a run shows."""

    summary: RunSummary
    life: Life
    now_ns: int
    answers: tuple[PageAnswer, ...]
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
    sums: RunSums | None = None,
) -> RunContent:
    """Compute the content from the history of a run. `sums`: of it, as it was read before.

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
            events, summary, found, steps, now_ns=now_ns, life=life, price_per_hour=price_per_hour
        ),
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


def _renewed(
    known: RunContent, history: RunHistory, now_ns: int, price_per_hour: float
) -> RunContent:
    """Return a content as of now. No event has come since."""
    found = [story.incident for story in known.stories]
    renewed = answers(
        history.events,
        known.summary,
        found,
        known.steps,
        now_ns=now_ns,
        life=known.life,
        price_per_hour=price_per_hour,
    )
    return known._replace(now_ns=now_ns, answers=renewed)


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

    def _read_on(self) -> None:
        life = life_of(self.run_dir, self._history.events)
        damages = len(self._damages)
        new = self._history.read(self._reader, last=life == "died")
        known = self._content
        if known and not new and life == known.life and damages == len(self._damages):
            self._content = _renewed(known, self._history, time.time_ns(), self._price_per_hour)
        elif self._history.count:
            self._content = content(
                self._history,
                self.run_dir,
                self._damages,
                now_ns=time.time_ns(),
                life=life,
                price_per_hour=self._price_per_hour,
                sums=self._sums,
            )

    def log_tail(self, rank: int) -> str:
        """Return the last lines that the newest worker of a rank has written to stderr and stdout.

        Raises CorruptionError where the file leads out of the run directory.
        """
        root = (self.run_dir / "logs").resolve()
        tails = []
        for stream in ("stdout", "stderr"):
            paths = sorted(
                root.glob(f"{rank}/*/{stream}.log"), key=lambda path: path.stat().st_mtime
            )
            if not paths:
                continue
            path = paths[-1].resolve()
            if not path.is_relative_to(root):
                raise CorruptionError(
                    f"{paths[-1]} leads out of the run directory; it is not shown"
                )
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - LOG_BYTES))
                text = file.read(LOG_BYTES).decode(errors="replace")
            tails.append(f"{paths[-1].parent.name} {stream}:\n{text}")
        return "\n".join(tails)
