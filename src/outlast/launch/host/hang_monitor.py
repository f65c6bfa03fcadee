"""Detection of hung ranks from the pages and processes of one host."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from outlast.controller import hang_detection
from outlast.launch.host import reaper
from outlast.launch.host.worker_pool import WorkerHandle, WorkerPool
from outlast.transport import messages
from outlast.transport.worker_page import WorkerObservation, is_judged

WORKING_SHARE = 0.2  # of one core, between two samples
WAKES, WAKES_PER_S = 3, 2.0  # minimum of main thread wake-ups between two samples: both apply
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class _Sample(NamedTuple):
    t_ns: int
    spent_s: float
    wakes: int


class ProcessorTime:
    """Processor time samples, at most one per `window_s`, since each reads all of /proc."""

    def __init__(self, window_s: float) -> None:
        self._window_ns = int(window_s * 1e9)
        self._samples: dict[int, _Sample] = {}
        self._worked_ns: dict[int, int] = {}
        self._woken_ns: dict[int, int] = {}

    def worked_ns(self, pid: int) -> int:
        """Return CLOCK_MONOTONIC of the last sample that found the process working, or 0."""
        return self._worked_ns.get(pid, 0)

    def woken_ns(self, pid: int) -> int:
        """Return CLOCK_MONOTONIC of the last sample with frequent main thread wake-ups, or 0."""
        return self._woken_ns.get(pid, 0)

    def sample(self, pids: Collection[int]) -> None:
        """Sample these processes if the window has passed; forget all others."""
        for known in (self._samples, self._worked_ns, self._woken_ns):
            for pid in known.keys() - set(pids):
                del known[pid]
        now_ns = time.monotonic_ns()
        due = [
            pid
            for pid in pids
            if pid not in self._samples or now_ns - self._samples[pid].t_ns >= self._window_ns
        ]
        if not due:
            return
        processes = reaper.all_processes()
        for pid in due:
            family = reaper.descendants({pid}, processes) & processes.keys()
            spent_s = _TICK_S * sum(processes[member].spent_ticks for member in family)
            before = self._samples.get(pid)
            wakes = _wakes(pid)
            self._samples[pid] = _Sample(now_ns, spent_s, wakes)
            # On an oversubscribed host a process may wait for a core: runnable counts as working.
            works = pid in processes and processes[pid].state == "R"
            if before:
                passed_s = (now_ns - before.t_ns) / 1e9
                works = works or (spent_s - before.spent_s) / passed_s > WORKING_SHARE
                if wakes - before.wakes >= max(WAKES, WAKES_PER_S * passed_s):
                    self._woken_ns[pid] = now_ns
            if works:
                self._worked_ns[pid] = now_ns


def _wakes(pid: int) -> int:
    """Return the number of wake-ups of the main thread since its start; 0 after its end."""
    try:
        lines = Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    found = [line for line in lines if line.startswith("voluntary_ctxt_switches:")]
    return int(found[0].split()[1]) if found else 0


PERIOD_S = (0.02, 0.25)
FLOOR_PART = 20
WINDOW_S = (0.1, 1.0)  # shorter ones measure the kernel's clock ticks
WINDOW_PART = 10


class HangMonitor:
    """Hang detection from worker pages, read every 1/20 of the hang floor (20 to 250 ms).
    Processor time of workers without a beat: every 1/10 of the floor (0.1 to 1 s).

    With several nodes it judges stopped processes only. While a rank makes no progress it passes
    its observations to `report`, every 1/4 of the floor: the controller has those of all hosts.
    """

    def __init__(
        self,
        crew: WorkerPool,
        suspect: Callable[[messages.Suspect], None],
        report: Callable[[messages.RanksObserved], None],
    ) -> None:
        self._crew = crew
        self._suspect, self._report = suspect, report
        self._reported_ns = 0  # 0: all ranks make progress, as far as the controller knows
        self._limits = crew.plan.limits
        floor_s = self._limits.hang_floor_s
        self._period_s = _between(PERIOD_S, floor_s / FLOOR_PART)
        self._still_ns = int(1e9 * self._limits.hang_report_s)
        self._effort = ProcessorTime(_between(WINDOW_S, floor_s / WINDOW_PART))
        self._memory = hang_detection.WorkerHistory()
        self._looked_ns = self._awake_ns = time.monotonic_ns()

    async def run(self) -> None:
        """Examine all workers once a period, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(self._period_s)

    def look(self) -> None:
        """Examine all workers once, and report suspects."""
        now_ns = time.monotonic_ns()
        if now_ns - self._looked_ns > 1e9 + 2e9 * self._period_s:
            self._awake_ns = now_ns  # whatever stalled the launcher may have stalled the workers
        self._looked_ns = now_ns
        workers = [worker for worker in self._crew.workers.values() if worker.reaping is None]
        looks = [self._look_at(worker) for worker in workers]
        self._effort.sample(
            [
                worker.process.pid
                for worker, look in zip(workers, looks, strict=True)
                if is_judged(look) and now_ns - look.t_ns > self._still_ns
            ]
        )
        self._memory, verdict = hang_detection.watch(
            self._memory,
            looks,
            now_ns,
            self._limits,
            unix_ns=self._crew.clock.now_ns(),
            parts="all" if self._crew.plan.node.total == 1 else "stopped",
        )
        for fault in verdict.suspects:
            self._suspect(messages.Suspect(worker=fault.worker, fault=fault))
        if verdict.retry:
            self._suspect(messages.Suspect(worker="", fault=verdict.retry))
        if self._crew.plan.node.total > 1:
            self._report_ranks(tuple(look for look in looks if look.seat >= 0), now_ns)

    def _report_ranks(self, ranks: tuple[WorkerObservation, ...], now_ns: int) -> None:
        if not any(now_ns - look.t_ns > self._still_ns for look in ranks):
            if self._reported_ns:
                self._report(messages.RanksObserved(now_ns=now_ns))
            self._reported_ns = 0
        elif now_ns - self._reported_ns >= self._still_ns:
            self._report(messages.RanksObserved(now_ns=now_ns, ranks=ranks))
            self._reported_ns = now_ns

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
            stages=worker.stages,
        )


def _between(bounds: tuple[float, float], value: float) -> float:
    least, most = bounds
    return min(most, max(least, value))
