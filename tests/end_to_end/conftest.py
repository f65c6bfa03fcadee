"""Runs of a job under `outlast run`, and comparison with the undisturbed run."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from outlast import events
from outlast.errors import EXIT_DONE
from outlast.telemetry.committed_history import check_run
from outlast.telemetry.event_store import read_events

JOB = Path(__file__).with_name("jobs") / "training_job.py"
WORLD = 4
DEADLINE_S = 150.0
PATIENCE_S = 120.0


def wait_for(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_S) -> Any:
    """Poll a condition, with the error of the deadline given by the test."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if found := condition():
            return found
        pause.wait(0.02)
    raise AssertionError(f"{what}: not within {seconds} s")


@dataclass
class Outcome:
    """Results and files of one `outlast run`."""

    code: int
    output: str
    run_dir: Path
    out: Path
    world: int = WORLD

    @property
    def ranks(self) -> list[dict[str, Any]]:
        return [json.loads((self.out / f"{r}.json").read_text()) for r in range(self.world)]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    @property
    def events(self) -> list[events.AnyEvent]:
        return read_events(self.run_dir)

    def explain(self) -> str:
        command = [sys.executable, "-m", "outlast", "explain", str(self.run_dir)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Runner:
    """Starts launchers, and finds processes and files that they leave behind."""

    def __init__(self, folder: Path, world: int = WORLD) -> None:
        self.folder, self.world = folder, world
        self.processes: list[subprocess.Popen[str]] = []

    def start(
        self, *flags: str, job: tuple[str, ...] = (), name: str = "run", script: Path = JOB
    ) -> Any:
        if "--hold" in job:  # who waits there for the test is not stuck
            flags = ("--limit=hang_floor_s=60", *flags)
        command = [
            *(sys.executable, "-m", "outlast", "run", "--plain", f"--nproc-per-node={self.world}"),
            *(
                f"--run-dir={self.folder / name}",
                *flags,
                str(script),
                f"--out={self.folder / 'out'}",
            ),
            *job,
        ]
        log = (self.folder / f"{name}.txt").open("a")
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)
        log.close()
        self.processes.append(process)
        return process

    def end(self, process: subprocess.Popen[str], name: str = "run") -> Outcome:
        try:
            code = process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            text = (self.folder / f"{name}.txt").read_text()
            raise AssertionError(f"still running after {DEADLINE_S} s:\n{text[-6000:]}") from None
        text = (self.folder / f"{name}.txt").read_text()
        if code == EXIT_DONE:
            assert check_run(self.folder / name) == []
        return Outcome(code, text, self.folder / name, self.folder / "out", self.world)

    def run(self, *flags: str, job: tuple[str, ...] = (), script: Path = JOB) -> Outcome:
        return self.end(self.start(*flags, job=job, script=script))

    def left_behind(self) -> list[str]:
        """Return processes of runs in this folder, found by environment and command line."""
        mark = str(self.folder).encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    said = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                    zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                except (FileNotFoundError, ProcessLookupError, PermissionError):
                    continue
                if mark in said and not zombie:
                    found.append(f"{entry.name}: {said[-200:]!r}")
        return found


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    shared_before = abandoned_memory()
    made = Runner(tmp_path)
    yield made
    for process in made.processes:
        if process.poll() is None:
            process.kill()
            process.wait(10)
    wait_for(lambda: not made.left_behind(), f"nothing left: {made.left_behind()}", 15)
    wait_for(lambda: not abandoned_memory() - shared_before, "no shared memory left", 15)


def abandoned_memory() -> set[str]:
    """Return the names of torch's segments in /dev/shm whose process is not alive.

    torch names them `torch_PID_...`. Segments of living processes belong to other runs on this
    machine, since those of this run have ended; so may semaphores, which have no process.
    """
    names = os.listdir("/dev/shm")  # noqa: PTH208 - names only
    owned = ((name, re.match(r"torch_(\d+)_", name)) for name in names)
    return {name for name, pid in owned if pid and not Path("/proc", pid[1]).exists()}


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Outcome:
    """Return the undisturbed run, made once for all processes of a test session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "undisturbed"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder / "made"
        if made.exists():
            output = (folder / "run.txt").read_text()
            return Outcome(0, output, folder / "run", folder / "out")
        outcome = Runner(folder).run()
        assert outcome.code == 0, outcome.output
        assert outcome.summary["incidents"] == []
        made.touch()
    return outcome


def same(outcome: Outcome, undisturbed: Outcome) -> None:
    """Assert the bits and samples of the undisturbed run on every rank.

    The samples have the same order, and code between phases ran once a step.
    """
    assert outcome.code == 0, outcome.output
    ranks = outcome.ranks
    names = {rank.pop("name") for rank in ranks}
    assert len(names) == 1
    expected = undisturbed.ranks
    for rank in expected:
        rank.pop("name")
    for seat, (got, want) in enumerate(zip(ranks, expected, strict=True)):
        assert got["seen"] == want["seen"], f"rank {seat} saw other samples"
        assert got["state"] == want["state"], f"rank {seat}: the script's code between phases"
        assert got == want, f"rank {seat} ended in other bits"
    summary = outcome.summary
    assert summary["outcome"] == "done"
    assert summary["steps"] == undisturbed.summary["steps"]
    losses = _losses(outcome)
    for key, value in _losses(undisturbed).items():
        assert losses.get(key, value) == value, f"loss of (rank, step) {key}"


def _losses(outcome: Outcome) -> dict[tuple[int, int], float]:
    return {
        (event.seat, event.step): event.values["loss"]
        for event in outcome.events
        if isinstance(event, events.Metrics)
    }


def faults_told(outcome: Outcome) -> set[tuple[str, int]]:
    """Return (kind, rank) of every fault in the run's events, without echoes at peers."""
    return {
        (event.fault.kind, event.fault.seat)
        for event in outcome.events
        if isinstance(event, events.Noticed) and event.fault.kind != "transport"
    }


__all__ = ["Outcome", "Runner", "faults_told", "same", "wait_for"]
