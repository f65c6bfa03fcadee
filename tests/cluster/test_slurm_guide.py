"""The examples of docs/slurm.md for sbatch, salloc and several nodes, in a real Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.hosts import Hosts
from tests.cluster.slurm import Slurm, missing_requirement
from tests.end_to_end.conftest import wait_for

from outlast.errors import RunDirError
from outlast.events import PhaseDone
from outlast.telemetry.event_store import read_events

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.process,
    pytest.mark.skipif(bool(missing_requirement()), reason=missing_requirement()),
]
JOB = Path(__file__).with_name("steady_job.py")
PAGE = Path(__file__).parents[2] / "docs/slurm.md"
WORLD, STEPS = 2, 200


def example(mark: str, world: int = WORLD) -> str:
    """Return the block of the page that contains `mark`, for CPUs, `world` ranks a node and the
    tests' script."""
    blocks = PAGE.read_text().split("## Three ways", 1)[1].split("```")[1::2]
    (block,) = [each for each in blocks if mark in each]
    lines = [line for line in block.splitlines()[1:] if "#SBATCH --gres" not in line]
    text = "\n".join(lines).replace(" --gres=gpu:8", "").replace("node 8", f"node {world}")
    return text.replace("train.py", f"{JOB} out {STEPS}") + "\n"


class Guide:
    """A user of the cluster, with a folder for each example."""

    def __init__(self, hosts: Hosts, slurm: Slurm, folder: Path) -> None:
        self.hosts, self.slurm, self.folder = hosts, slurm, folder
        self._path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run(self, name: str, *argv: str) -> str:
        """Run a command of Slurm in the folder of an example; return its output."""
        (self.folder / name).mkdir(exist_ok=True)
        words = ("env", "-C", str(self.folder / name), f"PATH={self._path}", *argv)
        command = self.slurm.command(*words)
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def result(self, name: str) -> list[Any]:
        out = self.folder / name / "out"
        return [json.loads((out / f"{rank}.json").read_text()) for rank in range(WORLD)]

    def wait_for_step(self, run_dir: Path, step: int) -> None:
        def reached() -> bool:
            with suppress(RunDirError):  # it has not started yet
                done = [each for each in read_events(run_dir) if isinstance(each, PhaseDone)]
                return any(each.step >= step for each in done)
            return False

        wait_for(reached, f"step {step} in {run_dir}")


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guide]:
    folder = tmp_path_factory.mktemp("guide")
    with Hosts(folder, 3) as hosts, Slurm(hosts, folder / "slurm") as slurm:
        yield Guide(hosts, slurm, folder)


@pytest.fixture(scope="module")
def undisturbed(guide: Guide) -> list[Any]:
    """Return the result of the salloc example, run to its end."""
    allocate, step = example("salloc --nodes=1").splitlines()
    guide.run("calm", *allocate.split(), "sh", "-c", step)
    return guide.result("calm")


def test_an_own_sbatch_file_requeues_itself_and_resumes(
    guide: Guide, undisturbed: list[Any]
) -> None:
    (guide.folder / "own").mkdir()
    (guide.folder / "own/job.sh").write_text(example("#SBATCH"))
    job = guide.run("own", "sbatch", "--parsable", "job.sh").strip()
    guide.wait_for_step(guide.folder / f"own/runs/slurm-{job}", 20)
    guide.slurm.run("scancel", "--signal=TERM", job)
    guide.slurm.wait_for_state(job, "PENDING")
    guide.slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")
    ended = guide.slurm.wait_for_state(job, "COMPLETED", "FAILED")
    output = (guide.folder / f"own/slurm-{job}.out").read_text()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), output
    assert guide.result("own") == undisturbed


def test_several_nodes_of_an_allocation_without_submit(
    guide: Guide, undisturbed: list[Any]
) -> None:
    (guide.folder / "token").write_text("0123456789abcdef" * 4)
    (guide.folder / "token").chmod(0o600)
    text = example("--nnodes 2:3", world=1)
    text = text.replace("$HOME/.outlast-token", str(guide.folder / "token"))
    (guide.folder / "several").mkdir()
    (guide.folder / "several/step.sh").write_text(text)
    guide.run("several", "salloc", "--nodes=3", "bash", "step.sh")
    assert guide.result("several") == undisturbed
