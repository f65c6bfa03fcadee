"""Undisturbed steps of all systems, which take turns of a few steps on the same machine."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from rivals.job_parts import BLOCK, FIRST_GATE, TURNS
from rivals.systems import RANKS, System
from rivals.trial import Job

_LIMIT_S = 120.0
_POLL_S = 0.002
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Block(NamedTuple):
    """What a step of one turn took: on the clock, and of the processors, all processes of the
    system together."""

    wall_s: float
    cpu_s: float


class _Gated:
    """A job whose ranks wait between two turns, in their script, behind a committed step."""

    def __init__(self, system: System, folder: Path, steps: int) -> None:
        self._turns = folder / TURNS
        self._turns.touch()
        self._name, self._due = system.name, FIRST_GATE
        self.job = Job(system, folder, epochs=1, steps=steps)

    def arrive(self) -> int:
        """Wait until all ranks are at the gate; return when the last one came, monotonic, in ns."""
        end_s = time.monotonic() + _LIMIT_S
        while True:
            self.job.poll()
            at = {line["rank"]: line["t_ns"] for line in self.job.lines
                  if line["step"] == self._due}  # fmt: skip
            if len(at) == RANKS:
                return max(at.values())
            if any(code is not None for code in self.job.trainers()) or time.monotonic() > end_s:
                raise SystemExit(f"{self._name} never came to step {self._due}")
            time.sleep(_POLL_S)

    def block(self) -> Block:
        """Let all ranks train one turn."""
        cpu_s, begin_ns = self._cpu_s(), time.monotonic_ns()
        self._turns.with_suffix(f".{self._due}").touch()
        self._due += BLOCK
        end_ns = self.arrive()
        return Block((end_ns - begin_ns) / 1e9 / BLOCK, (self._cpu_s() - cpu_s) / BLOCK)

    def _cpu_s(self) -> float:
        """Return the processor time of all processes that live and came of the job's commands."""
        parents: dict[int, int] = {}
        ticks: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except (FileNotFoundError, ProcessLookupError):
                    continue  # it has just ended
                parents[int(entry.name)] = int(fields[1])
                ticks[int(entry.name)] = int(fields[11]) + int(fields[12])
        mine, found = set(self.job.pids()), 0
        while len(mine) > found:
            found = len(mine)
            mine |= {pid for pid, parent in parents.items() if parent in mine}
        return sum(ticks.get(pid, 0) for pid in mine) * _TICK_S


def alternate(systems: list[System], turns: int) -> dict[str, list[Block]]:
    """Return the blocks of each system, one a turn; in each turn another system begins. The first
    turn, beside which spares still start, does not count."""
    found: dict[str, list[Block]] = {system.name: [] for system in systems}
    with ExitStack() as stack:
        jobs: list[_Gated] = []
        for system in systems:
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            jobs.append(_Gated(system, Path(folder), steps=(turns + 2) * BLOCK))
            stack.callback(jobs[-1].job.stop)
            jobs[-1].arrive()
        for turn in range(turns + 1):
            for at in range(len(systems)):
                place = (at + turn) % len(systems)
                block = jobs[place].block()
                if turn:
                    found[systems[place].name].append(block)
            print(f"undisturbed: turn {turn} of {turns}", file=sys.stderr)
    return found
