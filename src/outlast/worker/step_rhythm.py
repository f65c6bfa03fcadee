"""Durations of steps, and how much a concurrent write slows them down."""

from __future__ import annotations

from statistics import median

from outlast.controller.save_schedule.save_costs import RunningMedian

SLOWED_MAX = 10_000


class StepRhythm:
    """Times whole steps, from the end of one boundary to the next one, saves left out."""

    def __init__(self) -> None:
        self._quiet = RunningMedian()
        self._slowed: list[float] = []
        self._begin_s = 0.0

    def begin(self, now_s: float) -> None:
        """A step begins."""
        self._begin_s = now_s

    def end(self, now_s: float, *, writing: bool) -> None:
        """It has ended; `writing`: a checkpoint was being written meanwhile."""
        if not self._begin_s:
            return
        step_s, self._begin_s = now_s - self._begin_s, 0.0
        if not writing:
            self._quiet = self._quiet.add(step_s)
        elif len(self._slowed) < SLOWED_MAX:
            self._slowed.append(step_s)

    @property
    def step_s(self) -> float:
        """While nothing is written; 0: unknown."""
        return self._quiet.median_s

    def drag_s(self) -> float:
        """By how much all steps were slower since the last call, beside a write that has ended.
        By medians: an evaluation among them is no drag."""
        slowed, self._slowed = self._slowed, []
        if not slowed or not self._quiet.values:
            return 0.0
        return len(slowed) * max(0.0, median(slowed) - self.step_s)
