"""The watch over this host's workers: pages and kernel states in, Suspects out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from outlast import wire
from outlast.core.detect import hang
from outlast.launch.crew import Crew, Worker

PERIOD_S = (0.02, 0.25)
FLOOR_PART = 20
_MOVING = ("idle", "running", "voting", "applying")


class Watch:
    """Looks at every page once a period: a twentieth of the hang floor, 20 to 250 ms."""

    def __init__(self, crew: Crew, say: Callable[[wire.Suspect], None]) -> None:
        self._crew = crew
        self._say = say
        self._limits = crew.plan.limits
        shortest_s, longest_s = PERIOD_S
        self._period_s = min(longest_s, max(shortest_s, self._limits.hang_floor_s / FLOOR_PART))
        self._memory = hang.Memory()
        self._first_n: dict[str, int] = {}  # where each process began to complete phases
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
        self._first_n = {
            look.worker: self._first_n[look.worker]
            for look in looks
            if look.worker in self._first_n
        }
        self._memory, verdict = hang.watch(
            self._memory, looks, now_ns, self._limits, unix_ns=time.time_ns()
        )
        for fault in verdict.suspects:
            self._say(wire.Suspect(worker=fault.worker, fault=fault))
        if verdict.retry:
            self._say(wire.Suspect(worker="", fault=verdict.retry))

    def _look_at(self, worker: Worker) -> hang.Look:
        beat = worker.page.read()
        if beat.state in _MOVING:
            self._first_n.setdefault(worker.name, beat.n)
        since_ns = max(worker.started_ns, self._awake_ns)
        return hang.Look(
            worker=worker.name,
            seat=worker.seat,
            n=beat.n,
            state=beat.state,
            collectives=beat.collectives,
            t_ns=max(beat.t_ns, since_ns),
            t_state_ns=max(beat.t_state_ns, since_ns),
            completed=beat.n - self._first_n.get(worker.name, beat.n),
            letter=worker.process.state,
        )
