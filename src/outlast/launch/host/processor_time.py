"""Processor time of workers and their descendants, as the kernel counts it.

A page tells what a main thread passes, not whether it works in between: a compilation or a long
evaluation passes nothing for minutes. What is stuck uses no processor; helper threads use little.
A main thread that the kernel wakes again and again (an upload under way, a poll) goes on, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from outlast.launch.host import reaper

WORKING_SHARE = 0.2  # of one core, between two samples
WAKES, WAKES_PER_S = 3, 2.0  # of the main thread between two samples: both must be reached
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class _Sample(NamedTuple):
    t_ns: int
    spent_s: float
    wakes: int


class ProcessorTime:
    """Samples those who are asked about, at most once in `window_s`: it reads all of /proc."""

    def __init__(self, window_s: float) -> None:
        self._window_ns = int(window_s * 1e9)
        self._samples: dict[int, _Sample] = {}
        self._worked_ns: dict[int, int] = {}
        self._woken_ns: dict[int, int] = {}

    def worked_ns(self, pid: int) -> int:
        """CLOCK_MONOTONIC of the last sample at which the process was seen to work, or 0."""
        return self._worked_ns.get(pid, 0)

    def woken_ns(self, pid: int) -> int:
        """CLOCK_MONOTONIC of the last sample that saw its main thread woken often, or 0."""
        return self._woken_ns.get(pid, 0)

    def sample(self, pids: Collection[int]) -> None:
        """Look at these processes if it is time to; whoever is not asked about is forgotten."""
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
            # On a crowded machine one may wait long for a core: who is runnable works as well.
            works = pid in processes and processes[pid].state == "R"
            if before:
                passed_s = (now_ns - before.t_ns) / 1e9
                works = works or (spent_s - before.spent_s) / passed_s > WORKING_SHARE
                if wakes - before.wakes >= max(WAKES, WAKES_PER_S * passed_s):
                    self._woken_ns[pid] = now_ns
            if works:
                self._worked_ns[pid] = now_ns


def _wakes(pid: int) -> int:
    """Return how often the main thread has slept and was woken since it began; 0 where it is
    gone."""
    try:
        lines = Path(f"/proc/{pid}/task/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    found = [line for line in lines if line.startswith("voluntary_ctxt_switches:")]
    return int(found[0].split()[1]) if found else 0
