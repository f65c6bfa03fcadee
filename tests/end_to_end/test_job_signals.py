"""Signals that a scheduler sends to every process of a job: launcher, workers, loader processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import wait_for

from outlast import events
from outlast.errors import EXIT_INTERRUPTED, RunDirError
from outlast.telemetry.event_store import read_events

pytestmark = pytest.mark.process
JOB = Path(__file__).parents[1] / "cluster" / "steady_job.py"
WORLD, STEPS = 2, 150


def start(folder: Path, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "outlast", "run", "--plain", f"--nproc-per-node={WORLD}"]
    command += [f"--run-dir={folder / 'run'}", *flags, str(JOB), str(folder / "out"), str(STEPS)]
    command += ["ddp", str(folder / "hold"), "0.02"]
    with (folder / "output").open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    _started.append(process)
    return process


_started: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def _no_launcher_is_left() -> Iterator[None]:
    yield
    while _started:
        _started.pop().kill()


def ended(folder: Path, process: subprocess.Popen[bytes]) -> str:
    """Return the code and what the launcher printed."""
    code = process.wait(100)
    return f"{code} {(folder / 'output').read_text()}"


def results(folder: Path) -> list[Any]:
    return [json.loads((folder / "out" / f"{rank}.json").read_text()) for rank in range(WORLD)]


def story(folder: Path) -> list[events.AnyEvent]:
    with suppress(RunDirError):  # it has not started yet
        return read_events(folder / "run")
    return []


def wait_for_step(folder: Path, step: int) -> None:
    def reached() -> bool:
        done = (event for event in story(folder) if isinstance(event, events.PhaseDone))
        return any(event.step >= step for event in done)

    wait_for(reached, f"step {step}")


def processes(launcher: int) -> list[int]:
    """Return the launcher and all its descendants, as a scheduler's container has them."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
    found = [launcher]
    for one in found:
        found += [pid for pid, parent in parents.items() if parent == one]
    return found


def signal_all(launcher: int, number: int) -> int:
    pids = processes(launcher)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return len(pids)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    text = ended(folder, start(folder))
    assert text.startswith("0 "), text
    return results(folder)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, id="TERM"),
        pytest.param(signal.SIGINT, id="INT", marks=pytest.mark.extended),
    ],
)
def test_a_run_whose_processes_all_get_a_stop_signal_saves_and_resumes(
    tmp_path: Path, undisturbed: list[Any], number: int
) -> None:
    process = start(tmp_path, "--checkpoint-every=15")
    wait_for_step(tmp_path, 20)
    # launcher, reaper, template, and of each rank the worker, a keeper and a loader process
    assert signal_all(process.pid, number) >= 3 + 3 * WORLD
    text = ended(tmp_path, process)
    assert text.startswith(f"{EXIT_INTERRUPTED} "), text
    saved = [event for event in story(tmp_path) if isinstance(event, events.CheckpointSaved)]
    assert saved[-1].step >= 20, text
    text = ended(tmp_path, start(tmp_path))
    assert text.startswith("0 "), text
    assert results(tmp_path) == undisturbed


@pytest.mark.extended
def test_a_run_whose_processes_all_get_a_save_signal_saves_and_goes_on(
    tmp_path: Path, undisturbed: list[Any]
) -> None:
    process = start(tmp_path)
    wait_for_step(tmp_path, 20)
    signal_all(process.pid, signal.SIGUSR1)
    text = ended(tmp_path, process)
    assert text.startswith("0 "), text
    assert "0 incidents, 1 checkpoint on request" in text
    assert results(tmp_path) == undisturbed


@pytest.mark.extended
def test_a_signal_to_one_worker_ends_it_after_a_while(
    tmp_path: Path, undisturbed: list[Any]
) -> None:
    """The worker ends while the loop stands: in a vote, it would take the step's result along."""
    (tmp_path / "hold").touch()
    process = start(tmp_path, "--limit=hang_floor_s=60")
    wait_for_step(tmp_path, STEPS - 10)
    spawned = [event for event in story(tmp_path) if isinstance(event, events.WorkerSpawned)]
    os.kill(spawned[0].pid, signal.SIGTERM)
    wait_for(
        lambda: any(isinstance(event, events.WorkerLost) for event in story(tmp_path)),
        "the worker's end",
    )
    (tmp_path / "hold").unlink()
    text = ended(tmp_path, process)
    assert text.startswith("0 ") and "was killed by SIGTERM" in text, text
    assert results(tmp_path) == undisturbed
