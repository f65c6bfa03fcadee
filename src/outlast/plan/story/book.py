"""The events of a told run, as a real one writes them; or nothing, where nobody asked for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outlast import events
from outlast.errors import RunDirError, StorageError, UsageError
from outlast.plan.job import Job
from outlast.plan.story.progress import Done
from outlast.telemetry.event_store import DIRECTORY
from outlast.telemetry.segment_files import SegmentWriter, segment_paths

BEGIN_S = 1_767_225_600  # 2026-01-01: the same story is the same bytes
EVENTS_MAX = 5_000_000
SCRIPT = "outlast.plan.story"
_KINDS: dict[str, events.PhaseKind] = {
    "work": "step",
    "memory": "checkpoint",
    "durable": "checkpoint",
}


def ns(time_s: float) -> int:
    """Seconds of a story, on the clock that its events have."""
    return BEGIN_S * 1_000_000_000 + round(time_s * 1e9)


def seconds(t_ns: int) -> float:
    """The other way round."""
    return (t_ns - BEGIN_S * 1_000_000_000) / 1e9


class Book:
    """Raises UsageError where more than EVENTS_MAX events are to be expected, RunDirError where
    the directory holds a run or cannot be made, StorageError when the disk refuses."""

    def __init__(self, run_dir: Path | None, job: Job) -> None:
        self._writer: SegmentWriter | None = None
        self._run_dir = run_dir
        self._written = 0
        if run_dir is None:
            return
        expected = job.nodes * job.work_s / job.interval_s * (3 * job.versions + 1)
        if expected > EVENTS_MAX:
            raise UsageError(
                f"run_dir: this story would have about {expected:.2g} events, above {EVENTS_MAX:g}:"
                " take fewer nodes, less work or longer intervals"
            )
        directory = run_dir / DIRECTORY
        if directory.is_dir() and segment_paths(directory):
            raise RunDirError(
                f"{run_dir} holds the events of a run; nothing was written; take another directory"
            )
        self._writer = SegmentWriter(directory, "story")

    @property
    def full(self) -> bool:
        """Failures have brought it to EVENTS_MAX."""
        return self._written >= EVENTS_MAX

    def emit(self, event: events.AnyEvent) -> None:
        if self._writer is None:
            return
        self._written += 1
        try:
            self._writer.append(events.encoder.encode(event))
        except OSError as error:
            raise StorageError(
                f"{self._run_dir}: the story cannot be written ({error.strerror}); what was written"
                " before can be read; make room, and tell it into another directory"
            ) from error

    def done(self, what: Done, seats: Sequence[str], generation: int) -> None:
        """A stage has ended, on every seat alike."""
        begin_s, end_s = what.stretches[0].begin_s, what.stretches[-1].end_s
        if self._writer is None or what.stage not in _KINDS or ns(begin_s) == ns(end_s):
            return
        for seat, worker in enumerate(seats):
            self.emit(
                events.PhaseDone(
                    t_ns=ns(end_s),
                    worker=worker,
                    seat=seat,
                    generation=generation,
                    n=what.n,
                    step=what.step,
                    kind=_KINDS[what.stage],
                    t_begin_ns=ns(begin_s),
                    t_vote_ns=ns(end_s),
                    steps=what.steps,
                )
            )

    def refused(self, what: Done, seats: Sequence[str], generation: int) -> None:
        """An attempt at a stage was lost, on every seat alike."""
        if self._writer is None:
            return
        for stretch in what.stretches:
            for seat, worker in enumerate(seats):
                self.emit(
                    events.AttemptRefused(
                        t_ns=ns(stretch.end_s),
                        worker=worker,
                        seat=seat,
                        generation=generation,
                        n=what.n,
                        step=what.step,
                        kind=_KINDS.get(what.stage, "checkpoint"),
                        t_begin_ns=ns(stretch.begin_s),
                        reason="the generation closed",
                    )
                )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
