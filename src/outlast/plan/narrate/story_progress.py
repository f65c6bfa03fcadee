"""Progress of the narrated job: work, saves, flushes, and their events."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from outlast import events
from outlast.errors import RunDirError, StorageError, UsageError
from outlast.plan.simulate.simulated_job import LIVE, MEMORY, SimulatedJob
from outlast.telemetry.event_store import DIRECTORY
from outlast.telemetry.segment_files import SegmentWriter, segment_paths

Stage = Literal["work", "memory", "durable", "flush", "done"]
ROUNDING = 1e-9  # of an interval or a step: less work than this is none
STEP_S = 1.0  # what is counted as a step where the job has none


class StagePosition(NamedTuple):
    """Number of durable saves, and of pieces of work since."""

    cycle: int
    version: int


class Stretch(NamedTuple):
    """Part of a stage without a failure, in seconds of wall time."""

    begin_s: float
    end_s: float


class StageResult(NamedTuple):
    """A stage that has ended or was interrupted; or `steps` of one that are equally long.

    `n`, `step`: position of the job behind it.
    """

    stage: Stage
    stretches: tuple[Stretch, ...]
    n: int
    step: int
    steps: int = 1


class JobProgress:
    """Stages of one job: a piece of work, its copy in memory, the next, ..., the durable save.

    `on_done` receives each stage that ends (of work: steps of equal length, and separately the one
    that a failure interrupted, when it is done), `on_saved` each save that can be restored, with
    its time and position.
    """

    def __init__(
        self,
        job: SimulatedJob,
        on_done: Callable[[StageResult], None],
        on_saved: Callable[[float, StagePosition], None],
    ) -> None:
        self._job = job
        self._on_done = on_done
        self._on_saved = on_saved
        self._piece_s = job.interval_s / job.versions
        self._step_s = step_s = job.step_s or STEP_S
        self._piece_steps = max(1, math.ceil(self._piece_s / step_s - ROUNDING))
        pieces = math.floor(job.work_s / self._piece_s + ROUNDING)
        rest = math.ceil((job.work_s - pieces * self._piece_s) / step_s - ROUNDING)
        self._steps = pieces * self._piece_steps + max(0, rest)
        self.place = self.copied = self.stored = StagePosition(0, 0)
        self.stage: Stage = "work"
        self._passed_s = 0.0  # of this stage
        self._stretches: tuple[Stretch, ...] = ()  # of this stage
        self._told = 0  # steps of this piece
        self._broken_n = -1  # the phase that the last failure broke off
        self._flushing: tuple[float, StagePosition] | None = None
        self.save_s = self.redo_s = 0.0

    # --- where ---

    @property
    def n(self) -> int:
        """Phases done, as a run counts them: steps and saves."""
        return self.n_at(self.place) + self._own_steps()

    @property
    def step(self) -> int:
        """Steps done."""
        return self.step_at(self.place) + self._own_steps()

    def n_at(self, place: StagePosition) -> int:
        """Return the phase number at a stage position."""
        in_version = self._piece_steps + 1
        return place.cycle * (self._job.versions * in_version + 1) + place.version * in_version

    def step_at(self, place: StagePosition) -> int:
        """Return the step at a stage position, at most the run's last."""
        pieces = place.cycle * self._job.versions + place.version
        return min(pieces * self._piece_steps, self._steps)

    def _own_steps(self) -> int:
        """Return the steps of this piece; a step that cannot be lost counts once it has begun."""
        if self.stage != "work":
            return self._piece_steps if self.stage == "memory" else 0
        if not self._job.step_s:
            return math.ceil(self._passed_s / STEP_S)
        return math.floor(self._passed_s / self._job.step_s)

    def _whole_s(self) -> float:
        """Return the seconds of this piece that are committed while live state survives."""
        return self._own_steps() * self._job.step_s if self._job.step_s else self._passed_s

    @property
    def work_s(self) -> float:
        """Seconds of work done and not lost so far."""
        own_s = {"work": self._passed_s, "memory": self._piece_s}.get(self.stage, 0.0)
        return min(self._work_s_at(self.place) + own_s, self._job.work_s)

    def _work_s_at(self, place: StagePosition) -> float:
        work_s = place.cycle * self._job.interval_s + place.version * self._piece_s
        return min(work_s, self._job.work_s)

    def _left_s(self, place: StagePosition) -> float:
        """Return the seconds of work behind a position."""
        left_s = self._job.work_s - self._work_s_at(place)
        return left_s if left_s > ROUNDING * self._job.interval_s else 0.0

    # --- running ---

    def run(self, now_s: float, until_s: float, enough: Callable[[], object]) -> float:
        """Run until `until_s`, the end, or the end of a stage at which `enough`; return when."""
        while self.stage != "done" and not enough():
            end_s = now_s + self._length_s() - self._passed_s
            reached_s = min(end_s, until_s)
            self._passed_s += reached_s - now_s
            self._stretches += (Stretch(now_s, reached_s),)
            if self.stage != "work":
                self.save_s += reached_s - now_s
            self.settle(reached_s)
            if end_s > until_s:
                return until_s
            now_s = end_s
            self._end(now_s)
        return now_s

    def _length_s(self) -> float:
        if self.stage == "work":
            return min(self._piece_s, self._left_s(self.place))
        job = self._job
        return {"memory": job.memory_cost_s, "durable": job.cost_s, "flush": job.flush_s}[
            self.stage
        ]

    def _end(self, now_s: float) -> None:
        stage = self.stage
        stretches = self._stretches
        passed_s = self._passed_s
        reported = self._told
        at = self.place
        cycle, version = at
        if stage == "work" and self._left_s(self.place) >= self._piece_s * (1 - ROUNDING):
            self._enter("memory")
        elif stage == "work":  # the last piece, cut short by the end: only the durable save follows
            self.place = StagePosition(cycle, version + 1)
            self._enter("durable")
        elif stage == "memory":
            self.place = self.copied = StagePosition(cycle, version + 1)
            self._enter(self._next())
        elif stage == "durable":
            self.place = self.copied = StagePosition(cycle + 1, 0)
            self._flushing = (now_s + self._job.flush_s, self.place)
            self._enter(self._next())
        else:
            self.settle(math.inf)
            self._enter("done")
        self.settle(now_s)
        done = StageResult(stage, stretches, self.n, self.step)
        if stage == "work":
            self._tell(at, reported, passed_s, done)
        else:
            self._on_done(done)

    def _tell(self, at: StagePosition, reported: int, passed_s: float, done: StageResult) -> None:
        """Report work on the piece behind `at`: `done`, ended `passed_s` into it."""
        (begin_s, end_s), first_n, first_step = done.stretches[-1], self.n_at(at), self.step_at(at)
        steps = done.step - first_step
        cuts = {self._broken_n - first_n - 1, self._broken_n - first_n}
        if steps * self._step_s > passed_s + ROUNDING * self._step_s:
            cuts.add(steps - 1)  # the last one is cut short
        for cut in sorted(cut for cut in cuts if reported < cut < steps):
            until_s = min(end_s, max(begin_s, end_s - passed_s + cut * self._step_s))
            stretch = Stretch(begin_s, until_s)
            self._on_done(
                StageResult("work", (stretch,), first_n + cut, first_step + cut, cut - reported)
            )
            begin_s = until_s
            reported = cut
        rest = max(1, steps - reported)
        self._on_done(done._replace(stretches=(Stretch(begin_s, end_s),), steps=rest))

    def _next(self) -> Stage:
        if self.place.version == self._job.versions:
            return "durable"
        if self._left_s(self.place):
            return "work"
        return "durable" if self.place.version else "flush"

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        self._passed_s = 0.0
        self._stretches = ()
        self._told = 0

    def settle(self, now_s: float) -> None:
        """Make a flush that has ended by now restorable."""
        if self._flushing is not None and self._flushing[0] <= now_s:
            when_s, self.stored = self._flushing
            self._flushing = None
            self._on_saved(when_s, self.stored)

    # --- failing ---

    def wait(self, waited_s: float) -> None:
        """Pass waiting time, in which a flush does not progress."""
        if self._flushing is not None:
            self._flushing = (self._flushing[0] + waited_s, self._flushing[1])

    def stop_flush(self, now_s: float) -> None:
        """Drop all state but what can be restored by now."""
        self.settle(now_s)
        self._flushing = None

    def break_off(self) -> StageResult:
        """Interrupt the stage by a failure; completed steps count. Return the interrupted stage."""
        if self.stage == "work" and self._stretches:
            begin_s, end_s = self._stretches[-1]
            whole_s = max(begin_s, end_s - (self._passed_s - self._whole_s()))
            if whole_s > begin_s:
                done = StageResult("work", (Stretch(begin_s, whole_s),), self.n, self.step)
                self._tell(self.place, self._told, self._whole_s(), done)
                self._told = self._own_steps()
            self._stretches = (Stretch(whole_s, end_s),) if whole_s < end_s else ()
        self._broken_n = self.n + 1
        return StageResult(
            self.stage, self._stretches, self._broken_n, self.step + (self.stage == "work")
        )

    def restore(self, source: int) -> tuple[Stretch, ...]:
        """Continue from `source`; return the part of the interrupted stage that is lost."""
        before_s = self.work_s
        lost = self._stretches
        if source == MEMORY and self.stage == "flush":
            lost = ()  # nothing of it was in the workers
        elif source != LIVE:
            if source != MEMORY:
                self.copied = self.stored
            self.place = self.copied
            self._enter(self._next())
        elif self.stage == "work":
            self._passed_s, self._stretches = self._whole_s(), ()
        else:
            lost = ()  # a save goes on
        self.redo_s += before_s - self.work_s
        return lost


BEGIN_S = 1_767_225_600  # 2026-01-01: the same story is the same bytes
EVENTS_MAX = 5_000_000
SCRIPT = "outlast.plan.story"
_KINDS: dict[str, events.PhaseKind] = {
    "work": "step",
    "memory": "checkpoint",
    "durable": "checkpoint",
}


def ns(time_s: float) -> int:
    """Return seconds of a story as ns on the clock of its events."""
    return BEGIN_S * 1_000_000_000 + round(time_s * 1e9)


def seconds(t_ns: int) -> float:
    """Return ns on the clock of events as seconds of the story."""
    return (t_ns - BEGIN_S * 1_000_000_000) / 1e9


class EventBook:
    """Writer of the story's events.

    Raises UsageError where more than EVENTS_MAX events are to be expected, RunDirError where the
    directory holds a run or cannot be made, StorageError when the disk refuses.
    """

    def __init__(self, run_dir: Path | None, job: SimulatedJob) -> None:
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
        """True if failures have brought the story to EVENTS_MAX."""
        return self._written >= EVENTS_MAX

    def emit(self, event: events.AnyEvent) -> None:
        """Write one event, if there is a run directory and it is not full."""
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

    def done(self, what: StageResult, seats: Sequence[str], generation: int) -> None:
        """Write the end of a stage, on every seat alike."""
        begin_s = what.stretches[0].begin_s
        end_s = what.stretches[-1].end_s
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

    def refused(self, what: StageResult, seats: Sequence[str], generation: int) -> None:
        """Write a lost attempt at a stage, on every seat alike."""
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
        """Close the event file, if there is one."""
        if self._writer is not None:
            self._writer.close()
