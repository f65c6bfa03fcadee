"""DDP bucket layouts: the bits of plain torchrun, with and without failures."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import DEADLINE_S, Outcome, Runner

pytestmark = pytest.mark.process
JOB = Path(__file__).with_name("jobs") / "bucket_job.py"
WORLD = 3  # two numbers have one sum; three have one for each order


def plain(folder: Path, *job: str) -> list[dict[str, Any]]:
    """What each rank has after each step of plain torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={WORLD}"),
        *(f"--master-port={port}", str(JOB), "--plain", f"--out={folder}", *job),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=DEADLINE_S, env=environment, capture_output=True)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


def equal(outcome: Outcome, expected: list[dict[str, Any]]) -> None:
    """Whoever joined late has fewer steps to tell of; of those each must be equal."""
    assert outcome.code == 0, outcome.output
    for rank, (got, want) in enumerate(zip(outcome.ranks, expected, strict=True)):
        steps = len(want["steps"])
        for step, seen in enumerate(got["steps"], steps - len(got["steps"])):
            other = [kind for kind in seen if seen[kind] != want["steps"][step][kind]]
            assert not other, f"rank {rank}, after step {step + 1}: {other}"


FEW = ("--only", "static", "varying", "late")
few_or_all = pytest.mark.parametrize(
    "kinds", [pytest.param(FEW, id="few"), pytest.param((), id="all", marks=pytest.mark.long)]
)


@pytest.mark.long
def test_an_undisturbed_run_has_the_bits_of_torchrun(tmp_path: Path) -> None:
    runner = Runner(tmp_path, WORLD)
    equal(runner.run(script=JOB), plain(tmp_path / "plain"))


@pytest.mark.extended
@few_or_all
def test_a_run_with_failures_has_the_bits_of_torchrun(
    tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    """Lost between a static graph's first and second backward, before and after the buckets are
    rebuilt, and an exception that leaves some reducers in the middle of a step. In a dry step
    everything raises: nobody is to blame for what no other rank has answered."""
    strikes = ("2:1:raise", "0:1:kill", "1:5:kill")
    runner = Runner(tmp_path, WORLD)
    job = ("--raise-dry", "--strike", *strikes, *kinds)
    outcome = runner.run("--spares=1", script=JOB, job=job)
    equal(outcome, plain(tmp_path / "plain", *kinds))
    assert all((tmp_path / f"struck-{strike}").exists() for strike in strikes)
    assert outcome.summary["committed_steps_lost"] == 0
    rungs = {incident["rung"] for incident in outcome.summary["incidents"]}
    assert rungs <= {"retry", "replace", "respawn"}
    assert "a dry step of train" in outcome.output
