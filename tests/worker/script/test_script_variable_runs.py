"""Real runs of scripts with state in variables: equal to torchrun, or refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.long]

JOB = Path(__file__).with_name("script_variables_job.py")
DEADLINE_S = 200


def run(command: list[str], job: list[str]) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", *command, "--nproc-per-node=2", str(JOB), *job],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("way", ["prefetch", "counted", "closure", "main"])
def test_a_script_with_state_of_its_own_equals_torchrun(tmp_path: Path, way: str) -> None:
    job = ["--way", way, "--out"]
    torchrun = ["torch.distributed.run", "--standalone"]
    code, output = run(torchrun, [*job, str(tmp_path / "plain"), "--torchrun"])
    assert code == 0, output
    flags = ["--plain", f"--run-dir={tmp_path / 'run'}", "--spares=1"]
    fault = "--fault=kill:rank=0,step=5,phase=backward"
    code, output = run(["outlast", "run", *flags, fault], [*job, str(tmp_path / "killed")])
    assert code == 0, output
    for rank in range(2):
        plain = (tmp_path / "plain" / f"{rank}.json").read_text()
        assert (tmp_path / "killed" / f"{rank}.json").read_text() == plain


@pytest.mark.parametrize(("way", "name"), [("cycled", "cycle, a cycle"), ("late", "count")])
def test_uncarriable_variables_end_the_run(tmp_path: Path, way: str, name: str) -> None:
    flags = ["outlast", "run", "--plain", f"--run-dir={tmp_path / 'run'}"]
    code, output = run(flags, ["--way", way, "--out", str(tmp_path / "out")])
    assert code == 1, output
    assert name in output
