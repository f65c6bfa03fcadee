"""Two ranks on GPUs, killed, stopped and hung: the same bits as undisturbed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import Outcome, Runner
from tests.gpu.conftest import WORLD

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
JOB = Path(__file__).with_name("device_job.py")
PARALLEL = ("ddp", "fsdp")
FAULTS = {
    "killed in backward": ("kill:rank=1,step=4,phase=backward",),
    "killed in the vote": ("kill:rank=0,step=4,phase=vote",),
    "killed in apply": ("kill:rank=1,step=4,phase=apply",),
    "stopped": ("stop:rank=1,step=4,phase=forward",),
    "raised": ("raise:rank=0,step=4,phase=forward",),
}


def run(folder: Path, device: str, *flags: str, job: tuple[str, ...] = ()) -> Outcome:
    folder.mkdir()
    runner = Runner(folder, WORLD)
    outcome = runner.run("--spares=1", *flags, job=(f"--device={device}", *job), script=JOB)
    assert outcome.code == 0, outcome.output
    assert "did not strike" not in outcome.output, outcome.output
    return outcome


@pytest.fixture(scope="module")
def expected(
    device: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return {
        kind: run(folder / kind, device, job=(f"--parallel={kind}",)).ranks for kind in PARALLEL
    }


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_is_replaced(
    tmp_path: Path,
    device: str,
    expected: dict[str, list[dict[str, Any]]],
    fault: str,
    parallel: str,
) -> None:
    """With a copy of each step in memory, no step is lost, replicas or not."""
    faults = [f"--fault={each}" for each in FAULTS[fault]]
    flags = ("--snapshot-every=1", "--copies=2", *faults)
    outcome = run(tmp_path / "run", device, *flags, job=(f"--parallel={parallel}",))
    assert outcome.ranks == expected[parallel]
    assert outcome.summary["committed_steps_lost"] == 0


@pytest.mark.parametrize("parallel", PARALLEL)
def test_all_ranks_begin_anew_from_a_checkpoint(
    tmp_path: Path, device: str, expected: dict[str, list[dict[str, Any]]], parallel: str
) -> None:
    faults = [f"--fault=kill:rank={rank},step=6,phase=forward" for rank in range(WORLD)]
    flags = ("--checkpoint-every=2", *faults)
    outcome = run(tmp_path / "run", device, *flags, job=(f"--parallel={parallel}",))
    assert outcome.ranks == expected[parallel]


def test_a_hang_on_the_device_is_found(
    tmp_path: Path, device: str, expected: dict[str, list[dict[str, Any]]]
) -> None:
    outcome = run(tmp_path / "run", device, "--limit=hang_floor_s=5", job=("--stuck-at=4",))
    assert outcome.ranks == expected["ddp"]
    assert outcome.summary["committed_steps_lost"] == 0


def test_the_node_check_computes_on_each_device(device: str) -> None:
    command = [sys.executable, "-m", "outlast", "check", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    report = json.loads(result.stdout)
    judged = {each["check"] for each in report["findings"] if each["severity"] == "healthy"}
    assert ("gpu" in judged) == (device == "cuda"), result.stdout
