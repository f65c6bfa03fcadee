"""Standstill of a group whose script does not call ``outlast.init()``."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from outlast.launch.host.hang_monitor import ProcessorTime
from outlast.launch.host.worker_pool import WorkerHandle, WorkerPool

WARN_FLOORS = 6  # a standstill is reported after this many `hang_floor_s`
STANDSTILL_PERIOD_S = 1.0


class StandstillMonitor:
    """Hang detection for one host's workers by processor time with children and log sizes.

    ``warn`` gets one sentence per standstill. After ``hang_ceiling_s``, ``give_up`` is called
    with the reason; if it returns False, the group keeps running. A rank that spins in an NCCL
    collective uses processor time and is not detected; torch's own watchdog ends it.

    Args:
        is_watched: Return whether to monitor the workers now; False once a session has begun.
    """

    def __init__(
        self,
        crew: WorkerPool,
        warn: Callable[[str], None],
        give_up: Callable[[str], bool],
        is_watched: Callable[[], bool],
    ) -> None:
        self._crew = crew
        self._warn = warn
        self._give_up = give_up
        self._is_watched = is_watched
        self._effort = ProcessorTime(STANDSTILL_PERIOD_S)
        self._sizes: dict[str, int] = {}
        self._moved_ns = time.monotonic_ns()
        self._looked_ns = self._moved_ns
        self._is_reported = self._is_over = False

    async def run(self) -> None:
        """Take a sample once a second, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(STANDSTILL_PERIOD_S)

    def look(self) -> None:
        """Take one sample; call ``warn`` or ``give_up`` if the standstill exceeds a limit."""
        now_ns = time.monotonic_ns()
        workers = [each for each in self._crew.workers.values() if each.reaping is None]
        was_stalled = now_ns - self._looked_ns > 3e9 * STANDSTILL_PERIOD_S  # the launcher itself
        self._looked_ns = now_ns
        if not workers or was_stalled or not self._is_watched() or self._has_moved(workers):
            self._moved_ns = now_ns
            self._is_reported = self._is_over = False
            return
        limits = self._crew.plan.limits
        still_s = (now_ns - self._moved_ns) / 1e9
        reported = f"no rank has computed or written to its log for {still_s:.0f} s"
        if still_s > limits.hang_ceiling_s and not self._is_over:
            self._is_over = True
            if not self._give_up(f"{reported} (hang_ceiling_s)"):
                self._warn(f"{reported}; no restart is left (--max-restarts), so it is left alone")
        elif still_s > WARN_FLOORS * limits.hang_floor_s and not self._is_reported:
            self._is_reported = True
            pids = ", ".join(f"rank {each.seat}: pid {each.process.pid}" for each in workers)
            self._warn(
                f"{reported}: a hang, or a long wait. After {limits.hang_ceiling_s:g} s (--limit"
                " hang_ceiling_s=SECONDS) the group is restarted if --max-restarts allows it."
                f" To see where it stands: py-spy dump --pid PID ({pids})"
            )

    def _has_moved(self, workers: list[WorkerHandle]) -> bool:
        self._effort.sample([worker.process.pid for worker in workers])
        worked_ns = max(self._effort.worked_ns(worker.process.pid) for worker in workers)
        sizes = {worker.name: _log_size_bytes(worker) for worker in workers}
        has_grown, self._sizes = sizes != self._sizes, sizes
        return has_grown or worked_ns > self._moved_ns


def _log_size_bytes(worker: WorkerHandle) -> int:
    total = 0
    for name in ("stdout.log", "stderr.log"):
        try:
            total += os.stat(worker.process.log_dir / name).st_size  # noqa: PTH116 - one call
        except OSError:
            continue
    return total
