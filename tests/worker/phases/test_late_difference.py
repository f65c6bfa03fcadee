"""State beside the weights that first differs in the phase in which a rank dies after its vote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

JOB = Path(__file__).with_name("late_difference_job.py")
DIFFERS = 5  # index of the step


def run(folder: Path, *flags: str) -> list[str]:
    folder.mkdir()
    command = [
        *(sys.executable, "-m", "outlast", "run", "--plain", "--nproc-per-node=2", *flags),
        *(f"--run-dir={folder / 'run'}", str(JOB), str(DIFFERS), str(folder)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    incidents = json.loads((folder / "run" / "summary.json").read_text())["incidents"]
    assert len(incidents) == len(flags) // 2, done.stdout
    return [(folder / f"rank-{rank}.txt").read_text() for rank in range(2)]


@pytest.mark.extended
def test_a_rank_that_dies_where_its_state_first_differs_does_not_get_another_ranks(
    tmp_path: Path,
) -> None:
    expected = run(tmp_path / "undisturbed")
    assert expected[0] != expected[1]
    fault = f"--fault=kill:rank=1,step={DIFFERS + 1},phase=apply"
    assert run(tmp_path / "killed", "--spares=1", fault) == expected
