"""Timing of saves, at shared intervals and on request, and durations of steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from outlast.checkpoint.save.arena_slots import collector_paused
from outlast.config import AUTO, WorkerSettings
from outlast.controller.fault_spec import Where
from outlast.controller.save_schedule.save_tiers import RunningMedian
from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED
from outlast.worker.phases.phase_runner import PhaseRunner
from outlast.worker.phases.script_progress import Intervals, ScriptProgress
from outlast.worker.script.script_variables import CHECKPOINT
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.worker_status import WorkerStatus

if TYPE_CHECKING:
    from outlast.worker.worker_checkpointing import RunCheckpointer

TRIED_EVERY = 4


class SaveTimer:
    """Timer of saves, which are separate phases. `checkpointer`: set once the worker has a seat.

    Saves are refused by name while nobody can write the part of an absent rank.
    """

    def __init__(
        self,
        phases: PhaseRunner,
        place: ScriptProgress,
        status: WorkerStatus,
        watch: Callable[[Where], None],
        *,
        until_step: int,
        refuses: Callable[[], bool],
        need: Callable[[], ProtectedState],
    ) -> None:
        self._phases, self._place, self._status = phases, place, status
        self._until_step, self._watch, self._need = until_step, watch, need
        self._refuses = refuses
        self.checkpointer: RunCheckpointer | None = None
        self.proposal: Intervals | None = None  # set by the controller for the next save

    def end_step(self, next_batch: bytes) -> None:
        """Save if due between two steps. `next_batch` describes the next batch. A run with an
        `until_step` ends there with a checkpoint."""
        self._watch("between")
        checkpointer = self.checkpointer
        if checkpointer is not None:
            checkpointer.rhythm.end(time.monotonic(), writing=checkpointer.flushing)
            checkpointer.poll()
        step = self._status.step
        ends = 0 < step == self._until_step
        due = "disk" if ends else self._place.every.due(step) if step else ""
        if due and step != self._place.saved_step:
            self._place.every = self._save(next_batch, to_disk=due == "disk")
            self._place.saved_step = step
        elif (
            checkpointer is not None
            and step
            and (self._place.every.memory or self._place.every.disk)
        ):
            checkpointer.reserve(self._need())  # by now the optimizer has created its state
        if ends:
            raise SystemExit(EXIT_DONE)
        if checkpointer is not None:
            checkpointer.rhythm.begin(time.monotonic())

    def on_request(self) -> None:
        """Save a checkpoint at the script's present place; end the script for a drain."""
        request = self._status.requested
        self._phases.aside = True
        try:
            self._save()
        finally:
            self._phases.aside = False
        self._status.requested = ""
        if request == "drain":
            raise SystemExit(EXIT_INTERRUPTED)

    def wait_durable(self, timeout_s: float) -> None:
        """Wait until saves under way are durable, and report their outcomes."""
        if self.checkpointer is not None:
            self._status.enter("checkpoint")
            self.checkpointer.settle(timeout_s)

    def _save(self, next_batch: bytes = b"", *, to_disk: bool = True) -> Intervals:
        """Save the state at this place: with `next_batch` the start of the next step, else the
        script's present place. Return the next intervals, equal on all ranks."""
        protected, checkpointer = self._need(), self.checkpointer
        assert checkpointer is not None

        def save() -> tuple[int, int]:
            if self._refuses():
                return self._place.every.memory, self._place.every.disk
            own = protected.own_state(protected.own_choices())
            slot = self._place.slot(self._status.n, self._status.step, own)
            slot = msgspec.structs.replace(slot, saved_step=self._status.step)
            if next_batch:
                slot = msgspec.structs.replace(
                    slot, batch=next_batch, done=(), between=(), at_draw=True
                )
            with collector_paused():
                every = checkpointer.save(
                    protected, slot, to_disk=to_disk, propose=self.proposal or slot.every
                )
            return every.memory, every.disk

        every = self._phases.run(save, key=CHECKPOINT, kind="checkpoint")
        checkpointer.complete()
        return Intervals(*every)


def first_intervals(settings: WorkerSettings) -> Intervals:
    """Return the intervals until the run has measured its costs, TRIED_EVERY for AUTO."""
    memory, disk = settings.snapshot_every, settings.checkpoint_every
    return Intervals(
        TRIED_EVERY if memory == AUTO else memory, TRIED_EVERY if disk == AUTO else disk
    )


SLOWED_MAX = 10_000


class StepRhythm:
    """Durations of whole steps between two boundaries, without saves."""

    def __init__(self) -> None:
        self._quiet = RunningMedian()
        self._slowed: list[float] = []
        self._begin_s = 0.0

    def begin(self, now_s: float) -> None:
        """Begin a step."""
        self._begin_s = now_s

    def end(self, now_s: float, *, writing: bool) -> None:
        """End the step; `writing`: a checkpoint was being written during it."""
        if not self._begin_s:
            return
        step_s, self._begin_s = now_s - self._begin_s, 0.0
        if not writing:
            self._quiet = self._quiet.add(step_s)
        elif len(self._slowed) < SLOWED_MAX:
            self._slowed.append(step_s)

    @property
    def step_s(self) -> float:
        """Return the step time in seconds without a write under way; 0: unknown."""
        return self._quiet.median_s

    def drag_s(self) -> float:
        """Return the total slow-down in seconds of the steps beside a write since the last call.
        Medians are compared, so that an evaluation does not count as drag."""
        slowed, self._slowed = self._slowed, []
        if not slowed or not self._quiet.values:
            return 0.0
        return len(slowed) * max(0.0, median(slowed) - self.step_s)
