"""One run of a job under one system, with one fault from outside, and what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rivals.systems import RANKS, Command, System

from outlast.config import child_environment

EPOCHS, STEPS, SAVE_EVERY = 2, 40, 10
_POLL_S = 0.002
_STOP_S = 20.0
_LAST_S = 30.0  # that a rank has for its end, once another one has come to it
_ENDED = "its end"
_OWN = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Fault(NamedTuple):
    """`kind` is sent to the process of `rank`, `after_s` behind its commit of `step`."""

    kind: str
    rank: int
    step: int
    after_s: float


class Trial(NamedTuple):
    """What a run left. Times in seconds, None where it never came to that.

    `next_commit_s`: from the fault to the next commit of any step by any rank. `regained_s`: until
    the last rank has committed the step that the fault broke off. `redone`: commits that a rank did
    again. `end`: what ended the job.
    """

    next_commit_s: float | None
    regained_s: float | None
    redone: int
    samples_lost: int
    samples_repeated: int
    difference_max: float | None
    end: str

    @property
    def is_equal(self) -> bool:
        return self.difference_max == 0.0 and not self.samples_lost + self.samples_repeated


class Reference(NamedTuple):
    """What the plain script has trained, undisturbed."""

    samples: Counter[int]
    weights: torch.Tensor


def faults(kind: str, seed: int, count: int) -> list[Fault]:
    """Return one fault for each turn, drawn from the seed: each rank in turn, in the middle half of
    the job, and in the first half of a step, so that nobody can have committed that step yet."""
    dice = random.Random(f"{kind} {seed}")
    first, total = dice.randrange(RANKS), EPOCHS * STEPS
    return [
        Fault(kind, (first + at) % RANKS, dice.randrange(total // 4, 3 * total // 4), dice.random())
        for at in range(count)
    ]


class Job:
    """The processes of a run, and the record of its ranks."""

    def __init__(
        self, system: System, folder: Path, *, epochs: int = EPOCHS, steps: int = STEPS
    ) -> None:
        flags = (
            f"--epochs={epochs}",
            f"--steps={steps}",
            f"--ranks={RANKS}",
            f"--save-every={SAVE_EVERY}",
        )
        self.lines: list[dict[str, Any]] = []
        self.ended: set[int] = set()
        self._record, self._read = folder / "record", 0
        self._commands = system.commands(folder, flags)
        self._processes = [
            self._start(command, folder / f"output.{at}")
            for at, command in enumerate(self._commands)
        ]

    @staticmethod
    def _start(command: Command, output: Path) -> subprocess.Popen[bytes]:
        with output.open("wb") as file:
            return subprocess.Popen(
                command.argv,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=child_environment(_OWN | command.environment),
                start_new_session=True,
            )

    def poll(self) -> None:
        """Read the lines that are new and whole."""
        with contextlib.suppress(FileNotFoundError), self._record.open("rb") as file:
            file.seek(self._read)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read += len(whole)
            for text in whole.splitlines():
                line = json.loads(text)
                self.ended.add(line["rank"]) if "end" in line else self.lines.append(line)

    def trainers(self) -> list[int | None]:
        """Return the exit codes of the commands that train, None for those that run."""
        pairs = zip(self._commands, self._processes, strict=True)
        return [process.poll() for command, process in pairs if command.trains]

    def pids(self) -> list[int]:
        """Return the processes of all commands."""
        return [process.pid for process in self._processes]

    def stop(self) -> None:
        """End all processes that are left, also those that stand."""
        for sent in (signal.SIGTERM, signal.SIGCONT, signal.SIGKILL):
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sent)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        for pid in {line["pid"] for line in self.lines}:  # of sessions of their own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def run_trial(
    system: System, fault: Fault | None, reference: Reference | None, limit_s: float
) -> tuple[Trial, Reference | None]:
    """Run the job once; return its figures, and what it trained if it ended undisturbed."""
    folder = Path(tempfile.mkdtemp(prefix="outlast-compare-"))
    job = Job(system, folder)
    try:
        struck_ns, end = _watch(job, fault, limit_s)
    finally:
        job.stop()
    trained = _reference(job, folder) if job.ended else None
    trial = _judge(job, fault, struck_ns, end, reference, trained)
    if end.startswith(_ENDED):
        shutil.rmtree(folder)
    else:
        print(f"{system.name}: {folder} is kept", file=sys.stderr)
    return trial, trained


def _watch(job: Job, fault: Fault | None, limit_s: float) -> tuple[int, str]:
    """Strike when it is time; return when that was, and what ended the job."""
    struck_ns, end_s = 0, time.monotonic() + limit_s
    while True:
        time.sleep(_POLL_S)
        job.poll()
        if fault and not struck_ns:
            struck_ns = _strike(job, fault)
        codes = job.trainers()
        if all(code is not None for code in codes):
            job.poll()
            return struck_ns, _ENDED if len(job.ended) == RANKS else f"exit codes {codes}"
        if job.ended and job.lines[-1]["t_ns"] < time.monotonic_ns() - _LAST_S * 1e9:
            return struck_ns, f"{_ENDED} on rank {min(job.ended)} alone"
        if time.monotonic() > end_s:
            return struck_ns, f"stopped by hand after {limit_s:.0f} s"


def _strike(job: Job, fault: Fault) -> int:
    mine = [line for line in job.lines if line["rank"] == fault.rank]
    if not mine or mine[-1]["step"] < fault.step:
        return 0
    step_s = (mine[-1]["t_ns"] - mine[len(mine) // 2]["t_ns"]) / 1e9 / (len(mine) - len(mine) // 2)
    due_ns = mine[-1]["t_ns"] + int(fault.after_s * step_s / 2 * 1e9)
    while time.monotonic_ns() < due_ns:
        time.sleep(0.001)
    os.kill(mine[-1]["pid"], SIGNALS[fault.kind])
    return time.monotonic_ns()


def _reference(job: Job, folder: Path) -> Reference:
    """Return the samples of the history that led to the end, and the weights of a rank."""
    last = {(line["rank"], line["step"]): line["samples"] for line in job.lines}
    weights = torch.load(folder / f"weights.{min(job.ended)}", weights_only=True)
    return Reference(Counter(each for samples in last.values() for each in samples), weights)


def _judge(
    job: Job,
    fault: Fault | None,
    struck_ns: int,
    end: str,
    reference: Reference | None,
    trained: Reference | None,
) -> Trial:
    known = {(line["rank"], line["step"]) for line in job.lines if line["t_ns"] <= struck_ns}
    newest = max((step for rank, step in known if fault and rank == fault.rank), default=0)
    later = [  # without those of another rank that only came a moment later to the same step
        line
        for line in job.lines
        if 0 < struck_ns < line["t_ns"]
        and ((line["rank"], line["step"]) in known or line["step"] > newest)
    ]
    broken = newest + 1
    first = {line["rank"]: line["t_ns"] for line in reversed(later) if line["step"] == broken}
    next_ns = min((line["t_ns"] for line in later), default=0)
    commits = [(line["rank"], line["step"]) for line in job.lines]
    lost = repeated = 0
    difference = None
    if reference and trained:
        lost = (reference.samples - trained.samples).total()
        repeated = (trained.samples - reference.samples).total()
        difference = (trained.weights - reference.weights).abs().max().item()
    return Trial(
        (next_ns - struck_ns) / 1e9 if next_ns else None,
        (max(first.values()) - struck_ns) / 1e9 if first else None,
        len(commits) - len(set(commits)),
        lost,
        repeated,
        difference,
        end,
    )
