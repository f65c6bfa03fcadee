"""Content of a run's page, and the reading of the run that keeps it up to date."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from outlast.errors import CorruptionError
from outlast.events import (
    AnyEvent,
    CheckpointSaved,
    Drained,
    Metrics,
    Warned,
    WorkerLost,
    WorkerSeated,
    WorkerSpawned,
)
from outlast.telemetry.event_store import EventReader, Life, life_of
from outlast.telemetry.incident_explanation import story
from outlast.telemetry.incidents import Incident, incidents
from outlast.telemetry.job_progress import changed_findings
from outlast.telemetry.run_summary import RunSummary, summarise_events
from outlast.telemetry.segment_files import SegmentDamage
from outlast.telemetry.time_accounting import TimeAccount, account
from outlast.web.run_answers import PageAnswer, StepTimes, answers, step_times

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


class RunContent(NamedTuple):
    """Everything that the page of a run shows. Points of curves are (Unix nanoseconds, value)."""

    summary: RunSummary
    life: Life
    now_ns: int
    answers: tuple[PageAnswer, ...]
    times: TimeAccount
    stories: list[IncidentStory]
    steps: StepTimes
    loss: list[tuple[int, float]]
    saved: list[CheckpointSaved]
    drained: list[Drained]
    workers: list[WorkerLine]
    findings: list[Warned]
    events: int


def content(
    events: Sequence[AnyEvent],
    run_dir: Path,
    damages: Sequence[SegmentDamage] = (),
    *,
    now_ns: int,
    life: Life,
    price_per_hour: float = 0.0,
) -> RunContent:
    """Compute the content from all events of a run, by time.

    Raises CorruptionError when the times do not add up, RunDirError without a start.
    """
    times = account(events, running=life == "running")
    summary = summarise_events(events, run_dir, damages, life=life, times=times)
    found = incidents(events)
    return RunContent(
        summary=summary,
        life=life,
        now_ns=now_ns,
        answers=answers(
            events, summary, found, now_ns=now_ns, life=life, price_per_hour=price_per_hour
        ),
        times=times,
        stories=[IncidentStory(incident, story(incident, life)) for incident in found],
        steps=step_times(events),
        loss=_losses(events),
        saved=[event for event in events if isinstance(event, CheckpointSaved)],
        drained=[event for event in events if isinstance(event, Drained)],
        workers=_workers(events),
        findings=list(changed_findings(events)),
        events=len(events),
    )


def _losses(events: Sequence[AnyEvent]) -> list[tuple[int, float]]:
    """Return the losses of the lowest rank that reports one, of each step the last."""
    reports = [event for event in events if isinstance(event, Metrics) and "loss" in event.values]
    seat = min((event.seat for event in reports), default=-1)
    by_step = {event.step: event for event in reports if event.seat == seat}
    return sorted((event.t_ns, event.values["loss"]) for event in by_step.values())


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


class RunReading:
    """Events of one run, read on at each refresh; several threads may ask for its content."""

    def __init__(self, run_dir: Path, price_per_hour: float = 0.0) -> None:
        self.run_dir = run_dir
        self._price_per_hour = price_per_hour
        self._damages: list[SegmentDamage] = []
        self._reader = EventReader(run_dir, self._damages.append)
        self._events: list[AnyEvent] = []
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

    def _read_on(self) -> None:
        life = life_of(self.run_dir, self._events)
        new = self._reader.poll(last=life == "died")
        if new and self._events and new[0].t_ns < self._events[-1].t_ns:
            new = sorted([*self._events, *new], key=lambda event: event.t_ns)
            self._events = new
        else:
            self._events += new
        if self._events:
            self._content = content(
                self._events,
                self.run_dir,
                self._damages,
                now_ns=time.time_ns(),
                life=life,
                price_per_hour=self._price_per_hour,
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
