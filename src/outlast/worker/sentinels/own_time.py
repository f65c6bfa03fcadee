"""Own time of this rank: the part of a step in which it does not wait for other ranks.

All ranks of a job make steps of equal length, since they wait for the slowest one. Their own times
differ. A step lasts from the answer to one vote until the answer to the next:

    vote ── optimizer, script, data ── phase: compute ── wait ── compute ──────── vote ── answer
            └── own, before the phase ┘└─ own ─┘         └ other ┘└─── own ───┘    └ other ┘

A collective that runs in the background (DDP, FSDP2) ends nothing: the rank computes on until it
waits. DDP waits in C++, where Python does not see it: a collective whose future was taken counts as
the end of the rank's own work, and what lies between it and the next wait or vote is not counted.

The cost is two readings of the clock for each wait, and one for each future.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from outlast.transport.worker_page import OwnTimeRecord, Page

_RECORD_S = 0.04  # between two records of a small world
_RANKS_PER_S = 4096  # of all ranks' records, in a large one
_FOREIGN = ("checkpoint",)  # kinds of phases that make the next step unlike others


class OwnTime:
    """Measures steps of this rank. Every method runs on the main thread, except that a wait may
    begin and end on another one; then it is counted approximately."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._mark_ns = 0  # begin of the present part of own time; 0: waits, or measures nothing
        self._future_ns = 0  # newest collective of this part whose wait is not seen
        self._waits = 0  # under way
        self._own_ns = self._begun_ns = 0  # of the step under way; its begin
        self._before_ns = 0  # of its own time, before the phase
        self._is_whole = False  # nothing but the step has happened since its begin
        self._place: tuple[int, bool] = (
            0,
            False,
        )  # generation; is an attempt under way?
        self._stride = 1  # steps of a record, a power of two
        self._total = OwnTimeRecord()
        self._recorded = OwnTimeRecord()
        self.world = 1  # ranks, whose number bounds the rate of records
        self.last_s = 0.0  # own time of the newest whole step
        self._slept_ns = 0  # of the step under way, by an injected fault

    # --- waits ---

    def wait(self) -> OwnTime:
        """Return a context in which this rank waits for others."""
        return self

    def __enter__(self) -> None:
        self.begin_wait()

    def __exit__(self, *_: object) -> None:
        self.end_wait()

    def begin_wait(self) -> None:
        """Record that this rank begins to wait for others."""
        self._waits += 1
        if self._waits == 1:
            self._end_part(self._clock_ns())

    def end_wait(self) -> None:
        """Record that a wait is over."""
        self._waits -= 1
        if self._waits <= 0:
            self._waits = 0
            self._mark_ns = self._clock_ns()

    def future_taken(self) -> None:
        """Record that somebody waits for the newest collective where it cannot be seen."""
        self._future_ns = self._clock_ns()

    def _end_part(self, now_ns: int) -> None:
        if self._mark_ns:
            end_ns = self._future_ns if self._future_ns > self._mark_ns else now_ns
            self._own_ns += end_ns - self._mark_ns
        self._mark_ns = 0

    # --- phases ---

    def enter_phase(self, now_ns: int, generation: int) -> None:
        """Record the beginning of an attempt at a phase."""
        known, is_under_way = self._place
        if is_under_way or known != generation:  # an attempt was refused, or ranks were replaced
            self._is_whole = False
        self._place = generation, True
        self._before_ns = self._own_ns + (now_ns - self._mark_ns if self._mark_ns else 0)

    def enter_vote(self, now_ns: int) -> None:
        """Record that this rank has nothing left to do before the vote."""
        self._waits = 0
        self._end_part(now_ns)

    def won(self, now_ns: int, page: Page, *, step: int, is_step: bool, kind: str) -> None:
        """Record the answer to a won vote. `is_step`: the phase commits step `step`."""
        if is_step and self._is_whole:
            self._add(now_ns)
            if step % self._stride == 0:
                self._write(page, step)
        if is_step or kind in _FOREIGN:
            self._own_ns, self._begun_ns = 0, now_ns
            self._is_whole = kind not in _FOREIGN
            self._slept_ns = 0
        self._place = self._place[0], False
        self._mark_ns = now_ns

    def delay(self, factor: float) -> None:
        """Sleep as long as makes the own part of this step `factor` times the newest one's."""
        begun_ns = self._clock_ns()
        time.sleep((factor - 1) * self.last_s)  # house rule: an injected delay
        self._slept_ns += self._clock_ns() - begun_ns

    def _add(self, now_ns: int) -> None:
        total = self._total
        self.last_s = (self._own_ns - self._slept_ns) / 1e9
        self._total = OwnTimeRecord(
            generation=self._place[0],
            step=0,
            steps=total.steps + 1,
            step_us=total.step_us + (now_ns - self._begun_ns) // 1000,
            own_us=total.own_us + self._own_ns // 1000,
            before_us=total.before_us + min(self._before_ns, self._own_ns) // 1000,
        )

    def _write(self, page: Page, step: int) -> None:
        """Write a record; their steps are multiples of a power of two, so that ranks which differ
        in it have common ones."""
        passed_s = (self._total.step_us - self._recorded.step_us) / 1e6
        self._recorded = self._total
        page.put_own_time(self._total._replace(step=step))
        record_s = max(_RECORD_S, self.world / _RANKS_PER_S)
        if passed_s < record_s / 2:
            self._stride *= 2
        elif passed_s > 2 * record_s and self._stride > 1:
            self._stride //= 2
