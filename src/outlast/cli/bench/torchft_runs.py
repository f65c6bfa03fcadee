"""torchft in `outlast bench`: its lighthouse, and a `torchrun` for each replica group."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from outlast import config
from outlast.cli.bench.kill_schedule import LAST_STEPS, KillRecord, PlannedKill
from outlast.cli.bench.strategy_runs import (
    BATCH,
    BY_POLICY,
    TORCHFT,
    BenchJob,
    StrategyResult,
    compare_batches,
    trained_batches,
)
from outlast.cli.demo import difference_max, example
from outlast.errors import StorageError
from outlast.telemetry.event_store import Losses, reported_losses
from outlast.text_formatting import duration

RESTARTS_MAX = 1000  # of a replica group, by its torchrun
# As the README of torchft starts it.
LIGHTHOUSE = ("--min_replicas=1", "--quorum_tick_ms=100", "--join_timeout_ms=10000")
NO_BAND = "no prediction: torchft does not recover by the controller that the plan simulates"
_POLL_S = 0.02
_STOP_S = 20.0


def why_not_installed() -> str:
    """Return why torchft cannot be raced here; "" if it can."""
    missing = [name for name in ("torchft", "torchdata") if find_spec(name) is None]
    if missing:
        return (
            f"not run: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
            " (pip install torchft-nightly torchdata)"
        )
    if not _lighthouse():
        return "not run: torchft is installed without its command torchft_lighthouse"
    return ""


def _lighthouse() -> str:
    beside = Path(sys.executable).with_name("torchft_lighthouse")
    return str(beside) if beside.is_file() else shutil.which("torchft_lighthouse") or ""


class _Group:
    """Log of a replica group: its newest process, and the steps in which its batches counted."""

    def __init__(self, path: Path) -> None:
        self.pid = 0
        self.steps: dict[int, dict[str, Any]] = {}
        self.batches: list[tuple[int, float]] = []
        self.digest = ""
        self._path, self._read = path, 0

    def poll(self) -> None:
        """Read the lines that are new and whole."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read += len(whole)
            for line in whole.splitlines():
                self._take(msgspec.json.decode(line))

    def _take(self, line: dict[str, Any]) -> None:
        if "pid" in line:
            self.pid = line["pid"]
        elif "digest" in line:
            self.digest, self.pid = line["digest"], 0
        else:
            self.steps.setdefault(line["step"], line)
            self.batches.append((line["step"], line["batch"]))


class _Job:
    """The lighthouse and the replica groups of one run, and the kills among them."""

    def __init__(self, job: BenchJob, folder: Path, kills: tuple[PlannedKill, ...]) -> None:
        self._job, self._kills = job, kills
        self.folder = folder
        self.groups = [_Group(folder / f"{rank}.jsonl") for rank in range(job.world)]
        self.records: list[KillRecord] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> str:
        """Start all processes; return the command of a replica group."""
        port = _free_port()
        script = example().with_name("train_gpt_torchft.py")
        words = [str(script), f"--steps={self._job.steps}", f"--batch={BATCH}"]
        self._run("lighthouse", [_lighthouse(), *LIGHTHOUSE, f"--bind=127.0.0.1:{port}"], {})
        flags = ["--nnodes=1", "--nproc_per_node=1", f"--max_restarts={RESTARTS_MAX}"]
        for rank in range(self._job.world):
            torchrun = [f"--master_port={_free_port()}", *flags, *words]
            own = {
                "REPLICA_GROUP_ID": str(rank),
                "NUM_REPLICA_GROUPS": str(self._job.world),
                "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
                "BENCH_FOLDER": str(self.folder),
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",  # as torchrun and outlast set it for several ranks
            }
            launcher = [sys.executable, "-m", "torch.distributed.run", *torchrun]
            self._run(f"group-{rank}", launcher, own)
        return " ".join(["torchrun", *flags, *words])

    def _run(self, name: str, command: list[str], own: dict[str, str]) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=config.child_environment(own),
                    start_new_session=True,
                )
            )

    def wait(self, limit_s: float) -> str:
        """Carry out the schedule until all groups have ended; return why they did not, or ""."""
        pause, end_s = threading.Event(), time.monotonic() + limit_s
        groups = self._processes[1:]
        while any(process.poll() is None for process in groups):
            if time.monotonic() > end_s:
                return f"stopped after {duration(limit_s)}"
            if code := self._processes[0].poll():
                return f"torchft_lighthouse ended with exit code {code}"
            pause.wait(_POLL_S)
            self._kill_when_due()
        for group in self.groups:
            group.poll()
        failed = [str(rank) for rank, process in enumerate(groups) if process.returncode]
        return f"torchrun of replica group {', '.join(failed)} failed" if failed else ""

    def _kill_when_due(self) -> None:
        for group in self.groups:
            group.poll()
        if not all(group.steps for group in self.groups):
            return
        first_ns = max(min(one["t_ns"] for one in group.steps.values()) for group in self.groups)
        last = (self._job.steps - LAST_STEPS) * self._job.world
        for kill in self._kills[len(self.records) :]:
            if time.time_ns() < first_ns + kill.at_s * 1e9:
                return
            group = self.groups[kill.rank]
            pid = group.pid
            is_late = sum(len(one.steps) for one in self.groups) >= last
            if pid and not is_late:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                group.pid = 0
            fate = "ended" if is_late else "killed" if pid else "no-worker"
            self.records.append(
                KillRecord(at_s=kill.at_s, rank=kill.rank, worker=str(pid or ""), fate=fate)
            )

    def stop(self) -> None:
        """End all processes."""
        for ask in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):  # workers are in its session
                    os.killpg(process.pid, ask)
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_S)


def race_torchft(
    job: BenchJob,
    folder: Path,
    kills: tuple[PlannedKill, ...],
    reference: Path,
    *,
    limit_s: float,
    price_usd: float,
) -> StrategyResult:
    """Run the job under torchft, and return its figures. `reference`: the undisturbed run."""
    try:
        folder.mkdir()
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}; torchft was not started") from error
    run = _Job(job, folder, kills)
    began_s = time.monotonic()
    try:
        command = run.start()
        reason = run.wait(limit_s)
    finally:
        run.stop()
    wall_s = time.monotonic() - began_s
    fates = [record.fate for record in run.records]
    losses: Losses = {
        (rank, step, "loss"): line["loss"]
        for rank, group in enumerate(run.groups)
        for step, line in group.steps.items()
    }
    expected = {key: loss for key, loss in reported_losses(reference).items() if key in losses}
    ours = Counter(batch for group in run.groups for _, batch in group.batches)
    lost, repeated = compare_batches(ours, trained_batches(reference))
    times = [[line["t_ns"] for line in group.steps.values()] for group in run.groups]
    is_done = not reason and all(times)
    return StrategyResult(
        strategy=TORCHFT.name,
        command=f"{command} ({_version()})",
        outcome="done" if is_done else "gave_up",
        reason=reason,
        finish_s=(max(map(max, times)) - max(map(min, times))) / 1e9 if is_done else None,
        wall_s=wall_s,
        ettr=None,
        goodput=None,
        kills={fate: fates.count(fate) for fate in dict.fromkeys(fates)},
        rungs={},
        step_s=0.0,
        recovery_s=0.0,
        steps_redone=0,
        samples_lost=lost * BATCH,
        samples_repeated=repeated * BATCH,
        loss_difference_max=difference_max({key: losses[key] for key in expected}, expected),
        weights=BY_POLICY if is_done else "",
        cost_usd=wall_s * job.world / 3600 * price_usd,
        why=NO_BAND if is_done else f"the job did not end: {reason}",
    )


def _version() -> str:
    for name in ("torchft", "torchft-nightly"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    return "torchft of an unknown version"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
