"""Hang monitor of one host: pages and kernel states in, suspects out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from outlast.controller import hang_detection
from outlast.controller.worker_observation import WorkerObservation, is_judged
from outlast.launch.host.processor_time import ProcessorTime
from outlast.launch.host.worker_pool import WorkerHandle, WorkerPool
from outlast.transport import messages

PERIOD_S = (0.02, 0.25)
FLOOR_PART = 20
WINDOW_S = (0.1, 1.0)  # shorter ones measure the kernel's clock ticks
WINDOW_PART = 10
_STILL_PART = 4  # of the floor: before that, nobody asks who works


class HangMonitor:
    """Looks at every page once a period: a twentieth of the hang floor, 20 to 250 ms; and, a tenth
    of the floor apart, 0.1 to 1 s, at the processor time of those that have not moved."""

    def __init__(self, crew: WorkerPool, say: Callable[[messages.Suspect], None]) -> None:
        self._crew = crew
        self._say = say
        self._limits = crew.plan.limits
        floor_s = self._limits.hang_floor_s
        self._period_s = _between(PERIOD_S, floor_s / FLOOR_PART)
        self._still_ns = int(1e9 * floor_s / _STILL_PART)
        self._effort = ProcessorTime(_between(WINDOW_S, floor_s / WINDOW_PART))
        self._memory = hang_detection.WorkerHistory()
        self._looked_ns = self._awake_ns = time.monotonic_ns()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(self._period_s)

    def look(self) -> None:
        """One look at everybody, and what follows from it."""
        now_ns = time.monotonic_ns()
        if now_ns - self._looked_ns > 1e9 + 2e9 * self._period_s:
            self._awake_ns = now_ns  # if we stood still, so may the workers have
        self._looked_ns = now_ns
        workers = [worker for worker in self._crew.workers.values() if worker.burial is None]
        looks = [self._look_at(worker) for worker in workers]
        self._effort.sample(
            [
                worker.process.pid
                for worker, look in zip(workers, looks, strict=True)
                if is_judged(look) and now_ns - look.t_ns > self._still_ns
            ]
        )
        self._memory, verdict = hang_detection.watch(
            self._memory, looks, now_ns, self._limits, unix_ns=self._crew.clock.now_ns()
        )
        for fault in verdict.suspects:
            self._say(messages.Suspect(worker=fault.worker, fault=fault))
        if verdict.retry:
            self._say(messages.Suspect(worker="", fault=verdict.retry))

    def _look_at(self, worker: WorkerHandle) -> WorkerObservation:
        beat, pulse = worker.page.read(), worker.page.pulse()
        since_ns = max(worker.started_ns, self._awake_ns)
        return WorkerObservation(
            worker=worker.name,
            seat=worker.seat,
            n=beat.n,
            state=beat.state,
            collectives=beat.collectives,
            t_ns=max(beat.t_ns, since_ns, pulse.released_ns),
            t_work_ns=self._effort.worked_ns(worker.process.pid),
            t_woken_ns=self._effort.woken_ns(worker.process.pid),
            waits=pulse.is_waiting and pulse.beat_ns == beat.t_ns,
            key=beat.key,
            paces=worker.page.paces(),
            letter=worker.process.state,
        )


def _between(bounds: tuple[float, float], value: float) -> float:
    least, most = bounds
    return min(most, max(least, value))
