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
ROUNDING = 1e-9  # share of an interval or a step; less work counts as 0
STEP_S = 1.0  # length of a step where the job has none


class StagePosition(NamedTuple):
    """Number of durable saves, and of completed pieces of work since the last one."""

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
        rest_steps = math.ceil((job.work_s - pieces * self._piece_s) / step_s - ROUNDING)
        self._steps = pieces * self._piece_steps + max(0, rest_steps)
        self.position = self.copied = self.stored = StagePosition(0, 0)
        self.stage: Stage = "work"
        self._passed_s = 0.0  # of this stage
        self._stretches: tuple[Stretch, ...] = ()  # of this stage
        self._reported_steps = 0  # steps of this piece
        self._broken_n = -1  # phase that the last failure interrupted
        self._flushing: tuple[float, StagePosition] | None = None
        self.save_s = self.redo_s = self.slow_s = 0.0
        self.pace = 1.0  # seconds that a second of work takes: more while ranks are absent

    # --- position ---

    @property
    def n(self) -> int:
        """Completed phases, steps and saves, as a run counts them."""
        return self.n_at(self.position) + self._own_steps()

    @property
    def step(self) -> int:
        """Steps done."""
        return self.step_at(self.position) + self._own_steps()

    def n_at(self, position: StagePosition) -> int:
        """Return the phase number at a stage position."""
        in_version = self._piece_steps + 1
        return (
            position.cycle * (self._job.versions * in_version + 1) + position.version * in_version
        )

    def step_at(self, position: StagePosition) -> int:
        """Return the step at a stage position, at most the run's last."""
        pieces = position.cycle * self._job.versions + position.version
        return min(pieces * self._piece_steps, self._steps)

    def _own_steps(self) -> int:
        """Return the steps of this piece; where no step can be lost, a begun step counts."""
        if self.stage != "work":
            return self._piece_steps if self.stage == "memory" else 0
        if not self._job.step_s:
            return math.ceil(self._passed_s / STEP_S)
        return math.floor(self._passed_s / self._job.step_s)

    def _committed_s(self) -> float:
        """Return the seconds of this piece that are committed while live state survives."""
        return self._own_steps() * self._job.step_s if self._job.step_s else self._passed_s

    @property
    def work_s(self) -> float:
        """Seconds of work done and not lost so far."""
        own_s = {"work": self._passed_s, "memory": self._piece_s}.get(self.stage, 0.0)
        return min(self._work_s_at(self.position) + own_s, self._job.work_s)

    def _work_s_at(self, position: StagePosition) -> float:
        work_s = position.cycle * self._job.interval_s + position.version * self._piece_s
        return min(work_s, self._job.work_s)

    def _left_s(self, position: StagePosition) -> float:
        """Return the seconds of work that remain after a position."""
        left_s = self._job.work_s - self._work_s_at(position)
        return left_s if left_s > ROUNDING * self._job.interval_s else 0.0

    # --- running ---

    def run(self, now_s: float, until_s: float, is_over: Callable[[], object]) -> float:
        """Run until `until_s`, the end, or a stage end at which `is_over()`; return the time."""
        while self.stage != "done" and not is_over():
            pace = self.pace if self.stage == "work" else 1.0
            end_s = now_s + max(0.0, self._length_s() - self._passed_s) * pace
            reached_s = max(now_s, min(end_s, until_s))
            self._passed_s += (reached_s - now_s) / pace
            self._stretches += (Stretch(now_s, reached_s),)
            if self.stage == "work":
                self.slow_s += (reached_s - now_s) * (1 - 1 / pace)
            else:
                self.save_s += reached_s - now_s
            self.complete_flush(reached_s)
            if end_s > until_s:
                return until_s
            now_s = end_s
            self._end_stage(now_s)
        return now_s

    def _length_s(self) -> float:
        if self.stage == "work":
            return min(self._piece_s, self._left_s(self.position))
        job = self._job
        saves_s = {"memory": job.memory_cost_s, "durable": job.cost_s, "flush": job.flush_s}
        return saves_s[self.stage]

    def _end_stage(self, now_s: float) -> None:
        stage = self.stage
        stretches = self._stretches
        passed_s = self._passed_s
        reported = self._reported_steps
        position_before = self.position
        cycle, version = position_before
        if stage == "work" and self._left_s(self.position) >= self._piece_s * (1 - ROUNDING):
            self._enter_stage("memory")
        elif stage == "work":  # the last piece, cut short by the end: only the durable save follows
            self.position = StagePosition(cycle, version + 1)
            self._enter_stage("durable")
        elif stage == "memory":
            self.position = self.copied = StagePosition(cycle, version + 1)
            self._enter_stage(self._next_stage())
        elif stage == "durable":
            self.position = self.copied = StagePosition(cycle + 1, 0)
            self._flushing = (now_s + self._job.flush_s, self.position)
            self._enter_stage(self._next_stage())
        else:
            self.complete_flush(math.inf)
            self._enter_stage("done")
        self.complete_flush(now_s)
        ended = StageResult(stage, stretches, self.n, self.step)
        if stage == "work":
            self._report_work(position_before, reported, passed_s, ended)
        else:
            self._on_done(ended)

    def _report_work(
        self, start: StagePosition, reported: int, passed_s: float, ended: StageResult
    ) -> None:
        """Report the steps of the piece that starts at `start`, of which `passed_s` have passed."""
        begin_s, end_s = ended.stretches[-1]
        first_n = self.n_at(start)
        first_step = self.step_at(start)
        steps = ended.step - first_step
        cuts = {self._broken_n - first_n - 1, self._broken_n - first_n}
        if steps * self._step_s > passed_s + ROUNDING * self._step_s:
            cuts.add(steps - 1)  # the last one is cut short
        for cut in sorted(cut for cut in cuts if reported < cut < steps):
            rest_s = (passed_s - cut * self._step_s) * self.pace
            until_s = min(end_s, max(begin_s, end_s - rest_s))
            stretch = Stretch(begin_s, until_s)
            self._on_done(
                StageResult("work", (stretch,), first_n + cut, first_step + cut, cut - reported)
            )
            begin_s = until_s
            reported = cut
        rest_steps = max(1, steps - reported)
        self._on_done(ended._replace(stretches=(Stretch(begin_s, end_s),), steps=rest_steps))

    def _next_stage(self) -> Stage:
        if self.position.version == self._job.versions:
            return "durable"
        if self._left_s(self.position):
            return "work"
        return "durable" if self.position.version else "flush"

    def _enter_stage(self, stage: Stage) -> None:
        self.stage = stage
        self._passed_s = 0.0
        self._stretches = ()
        self._reported_steps = 0

    def complete_flush(self, now_s: float) -> None:
        """Make a checkpoint restorable whose flush has ended by now."""
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
        """Abort a flush that has not ended by now."""
        self.complete_flush(now_s)
        self._flushing = None

    def break_off(self) -> StageResult:
        """Interrupt the stage by a failure; completed steps count. Return the interrupted stage."""
        if self.stage == "work" and self._stretches:
            begin_s, end_s = self._stretches[-1]
            rest_s = (self._passed_s - self._committed_s()) * self.pace
            committed_s = max(begin_s, end_s - rest_s)
            if committed_s > begin_s:
                ended = StageResult("work", (Stretch(begin_s, committed_s),), self.n, self.step)
                self._report_work(self.position, self._reported_steps, self._committed_s(), ended)
                self._reported_steps = self._own_steps()
            self._stretches = (Stretch(committed_s, end_s),) if committed_s < end_s else ()
        self._broken_n = self.n + 1
        return StageResult(
            self.stage, self._stretches, self._broken_n, self.step + (self.stage == "work")
        )

    def restore(self, source: int) -> tuple[Stretch, ...]:
        """Continue from `source`; return the part of the interrupted stage that is lost."""
        before_s = self.work_s
        lost = self._stretches
        if source == MEMORY and self.stage == "flush":
            lost = ()  # a flush does not depend on the workers
        elif source != LIVE:
            if source != MEMORY:
                self.copied = self.stored
            self.position = self.copied
            self._enter_stage(self._next_stage())
        elif self.stage == "work":
            self._passed_s, self._stretches = self._committed_s(), ()
        else:
            lost = ()  # the save continues
        self.redo_s += before_s - self.work_s
        return lost


BEGIN_S = 1_767_225_600  # 2026-01-01; a fixed time, so that equal stories have equal bytes
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


def _present(seats: Sequence[str]) -> list[tuple[int, str]]:
    return [(seat, worker) for seat, worker in enumerate(seats) if worker]


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
                f"run_dir: this story would have about {expected:.2g} events, above {EVENTS_MAX:g};"
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
                f"{self._run_dir}: the story cannot be written ({error.strerror}); events written"
                " before are readable; free space and use another directory"
            ) from error

    def write_stage(self, result: StageResult, seats: Sequence[str], generation: int) -> None:
        """Write the end of a stage for every seat."""
        begin_s = result.stretches[0].begin_s
        end_s = result.stretches[-1].end_s
        if self._writer is None or result.stage not in _KINDS or ns(begin_s) == ns(end_s):
            return
        for seat, worker in _present(seats):
            self.emit(
                events.PhaseDone(
                    t_ns=ns(end_s),
                    worker=worker,
                    seat=seat,
                    generation=generation,
                    n=result.n,
                    step=result.step,
                    kind=_KINDS[result.stage],
                    t_begin_ns=ns(begin_s),
                    t_vote_ns=ns(end_s),
                    steps=result.steps,
                )
            )

    def write_lost_attempt(
        self, result: StageResult, seats: Sequence[str], generation: int
    ) -> None:
        """Write a lost attempt at a stage for every seat."""
        if self._writer is None:
            return
        for stretch in result.stretches:
            for seat, worker in _present(seats):
                self.emit(
                    events.AttemptRefused(
                        t_ns=ns(stretch.end_s),
                        worker=worker,
                        seat=seat,
                        generation=generation,
                        n=result.n,
                        step=result.step,
                        kind=_KINDS.get(result.stage, "checkpoint"),
                        t_begin_ns=ns(stretch.begin_s),
                        reason="the generation closed",
                    )
                )

    def close(self) -> None:
        """Close the event file, if there is one."""
        if self._writer is not None:
            self._writer.close()
