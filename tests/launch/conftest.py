"""Fixtures of real launchers and workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from outlast.launch import run_directory, torchrun_arguments
from outlast.launch.host.reaper import all_processes, read_process_stat
from outlast.launch.host.worker_pool import WorkerPool
from outlast.launch.run_directory import RunDir
from outlast.launch.run_display import DisplayRecord
from outlast.telemetry.event_store import EventClock, EventWriter
from outlast.telemetry.live_view import LineDisplay

DEADLINE_S = 60.0  # bounds a hang; it costs nothing where the machine is fast
Launcher = subprocess.Popen[str]
# What the workers' scripts here begin with: `tell` writes this process's number, whole.
HELP = """
def tell(name):
    with open(f"{ROOT}/{name}.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{ROOT}/{name}.part", f"{ROOT}/{name}")

def wait_for(condition):
    until_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)  # what other processes do with files wakes nobody

def in_child(name, act=lambda: None):
    if os.fork() == 0:
        act()
        tell(name)
        signal.pause()

def daemon(name):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        tell(name)
        signal.pause()
    os.wait()

"""

# A small training under outlast, up to its loop.
TRAINER = """
import torch, outlast
session = outlast.init()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.zeros(8192, 2))
session.protect(model=model, optimizer=optimizer, loader=loader)
def step(batch):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


class Stage:
    """One run directory with a worker pool, as a launcher has it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.token = secrets.token_bytes(32)
        self.notes: list[str] = []  # what the crew tells the owner

    def launch(self, script: Path, *flags: str, stderr: int = subprocess.PIPE) -> Launcher:
        """Start `outlast run` in this stage's run directory, as from a shell."""
        command = [sys.executable, "-m", "outlast", "run", "--run-dir", str(self.root / "run")]
        return subprocess.Popen(
            [*command, *flags, str(script)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        )

    @staticmethod
    def eventually(condition: Callable[[], object], what: str) -> None:
        """Poll a condition, with a deadline."""
        until_s = time.monotonic() + DEADLINE_S
        pause = threading.Event()
        while not condition():
            assert time.monotonic() < until_s, f"not within {DEADLINE_S} s: {what}"
            pause.wait(0.01)

    @staticmethod
    async def eventually_async(condition: Callable[[], object], what: str) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < until_s, f"not within {DEADLINE_S} s: {what}"
            await asyncio.sleep(0.01)

    @staticmethod
    def alive(pid: int) -> bool:
        """Return whether a process runs; a zombie does not."""
        seen = read_process_stat(pid)
        return seen is not None and seen.state not in "ZX"

    def pid_in(self, name: str) -> int:
        """Return the number in a file that a worker wrote, or 0."""
        path = self.root / name
        return int(path.read_text().strip() or 0) if path.exists() else 0

    def script(self, text: str, name: str = "script.py") -> Path:
        path = self.root / name
        head = f"import os, signal, subprocess, sys, time\nROOT = {str(self.root)!r}\n"
        path.write_text(head + HELP + text)
        return path

    def plan(self, script: Path, *flags: str) -> torchrun_arguments.RunPlan:
        return torchrun_arguments.parse(["--run-dir", str(self.root / "run"), *flags, str(script)])

    def play(
        self,
        plan: torchrun_arguments.RunPlan,
        act: Callable[[WorkerPool, DisplayRecord], Awaitable[object]],
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Run `act` with a worker pool, and end all workers afterwards."""

        async def scene() -> None:
            crew = WorkerPool(plan, run_dir, self.token, "here", EventClock(), self.notes.append)
            try:
                async with asyncio.timeout(deadline_s):
                    await act(crew, record)
            finally:
                await crew.close()

        run_dir: RunDir = run_directory.take(Path(plan.run_dir), plan.script, plan.args, plan.world)
        record = DisplayRecord(EventWriter(run_dir.room("events"), "test"), LineDisplay())
        try:
            asyncio.run(scene())
        finally:
            record.close()
            run_dir.release()


def _works_in(pid: int, root: Path) -> bool:
    """Return whether a process has a run directory below `root` in its environment."""
    try:
        return str(root).encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _descriptors() -> dict[str, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is gone by now
            found[entry.name] = str(entry.readlink())
    return found


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    before = _descriptors()
    threads = threading.active_count()
    stage = Stage(tmp_path)
    yield stage
    # What an earlier test gave up may still be ending: what this one left would stay.
    Stage.eventually(lambda: not _descriptors().items() - before.items(), "no descriptors left")
    Stage.eventually(lambda: threading.active_count() <= threads, "no threads left behind")
    ours = [pid for pid in all_processes() if _works_in(pid, tmp_path)]
    assert ours == [], "a test left processes behind"
