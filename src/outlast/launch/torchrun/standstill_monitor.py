"""Standstill of a group whose script does not call ``outlast.init()``."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable

from outlast.launch.host.hang_evidence import TRACES_FOLDER, folder_name
from outlast.launch.host.hang_monitor import ProcessorTime
from outlast.launch.host.worker_pool import WorkerHandle, WorkerPool
from outlast.launch.torchrun.stack_dumps import describe_standstill
from outlast.text_formatting import plural

WARN_FLOORS = 6  # a standstill is reported after this many `hang_floor_s`
STANDSTILL_PERIOD_S = 1.0


class StandstillMonitor:
    """Hang detection for one host's workers by processor time with children and log sizes.

    ``warn`` gets one sentence per standstill, with the ranks' calls from py-spy. After
    ``hang_ceiling_s``, ``give_up`` is called with the reason; if it returns False, the group keeps
    running. Ranks that wait so long for one that computes are reported, too. A rank that spins in
    an NCCL collective uses processor time and is not detected; torch's own watchdog ends it.

    Args:
        is_watched: Return whether to monitor the workers now; False once a session has begun.
        elsewhere: Return for how long the group's ranks on other hosts have stood still, in s.
    """

    def __init__(
        self,
        crew: WorkerPool,
        warn: Callable[[str], None],
        give_up: Callable[[str], bool],
        is_watched: Callable[[], bool],
        elsewhere: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._crew = crew
        self._warn = warn
        self._give_up = give_up
        self._is_watched = is_watched
        self._elsewhere = elsewhere
        self.still_s = 0.0  # all ranks on this host; none has started or ended since
        self._names: set[str] = set()
        self._changed_ns = time.monotonic_ns()  # of `_names`
        self._effort = ProcessorTime(STANDSTILL_PERIOD_S)
        self._sizes: dict[str, int] = {}
        self._looked_ns = self._all_moved_ns = time.monotonic_ns()  # not before: no standstill
        self._moved_ns: dict[str, int] = {}  # by worker
        self._is_reported = self._is_over = self._has_waiting = False

    async def run(self) -> None:
        """Take a sample once a second, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(STANDSTILL_PERIOD_S)

    async def look(self) -> None:
        """Take one sample; call ``warn`` or ``give_up`` if a standstill exceeds a limit."""
        now_ns = time.monotonic_ns()
        workers = [each for each in self._crew.workers.values() if each.reaping is None]
        was_stalled = now_ns - self._looked_ns > 3e9 * STANDSTILL_PERIOD_S  # the launcher itself
        self._looked_ns = now_ns
        if self._names != (names := {each.name for each in workers}):
            self._names, self._changed_ns = names, now_ns  # who waited for one of them goes on now
        if not workers or was_stalled or not self._is_watched():
            self._all_moved_ns, self._moved_ns = now_ns, {}
            self._is_reported = self._is_over = self._has_waiting = False
            self.still_s = (now_ns - self._changed_ns) / 1e9 if not workers else 0.0
            return
        self._sample(workers, now_ns)
        still_s = {each.seat: self._still_s(each, now_ns) for each in workers}
        self.still_s = min((now_ns - self._changed_ns) / 1e9, *still_s.values())
        longest_s, shortest_s = max(still_s.values()), min(self.still_s, self._elsewhere())
        limits = self._crew.plan.limits
        warn_s = WARN_FLOORS * limits.hang_floor_s
        if shortest_s < warn_s:
            self._is_reported = self._is_over = False
        if longest_s < warn_s:
            self._has_waiting = False
        reported = f"no rank has computed or written to its log for {shortest_s:.0f} s"
        if shortest_s > limits.hang_ceiling_s and not self._is_over:
            self._is_over = True
            reason = f"{reported} (hang_ceiling_s); {await self._calls(workers)}"
            if not self._give_up(reason):
                self._warn(f"{reason}; no restart is left (--max-restarts), so it is left alone")
        elif shortest_s > warn_s and not self._is_reported:
            self._is_reported = True
            self._warn(
                f"{reported}: a hang, or a long wait. After {limits.hang_ceiling_s:g} s (--limit"
                " hang_ceiling_s=SECONDS) the group is restarted if --max-restarts allows it;"
                f" {await self._calls(workers)}"
            )
        elif longest_s > limits.hang_ceiling_s > shortest_s and not self._has_waiting:
            self._has_waiting = True
            waiting = [seat for seat, each_s in still_s.items() if each_s > limits.hang_ceiling_s]
            self._warn(
                f"{plural(len(waiting), 'rank')} of {len(workers)} ({waiting[0]} first) waited for"
                f" {longest_s:.0f} s while others compute: a long task, or an endless loop;"
                f" {await self._calls(workers)}"
            )

    async def _calls(self, workers: list[WorkerHandle]) -> str:
        folder = self._crew.run_dir.path / TRACES_FOLDER / folder_name(self._crew.clock.now_ns())
        described = await describe_standstill(workers, folder)
        self._looked_ns = time.monotonic_ns()  # the launcher has not stalled
        return described

    def _sample(self, workers: list[WorkerHandle], now_ns: int) -> None:
        self._effort.sample([worker.process.pid for worker in workers])
        sizes = {worker.name: _log_size_bytes(worker) for worker in workers}
        for worker in workers:
            if sizes[worker.name] != self._sizes.get(worker.name):
                self._moved_ns[worker.name] = now_ns
        self._sizes = sizes

    def _still_s(self, worker: WorkerHandle, now_ns: int) -> float:
        moved_ns = self._moved_ns.get(worker.name, self._all_moved_ns)
        worked_ns = self._effort.worked_ns(worker.process.pid)
        return (now_ns - max(moved_ns, worked_ns, worker.started_ns)) / 1e9


def _log_size_bytes(worker: WorkerHandle) -> int:
    total = 0
    for name in ("stdout.log", "stderr.log"):
        try:
            total += os.stat(worker.process.log_dir / name).st_size  # noqa: PTH116 - one call
        except OSError:
            continue
    return total
