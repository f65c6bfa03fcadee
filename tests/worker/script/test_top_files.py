"""Files that a script writes above `init()`, in real runs: equal after a replacement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process

JOB = Path(__file__).with_name("top_files_job.py")
DEADLINE_S = 200


def run(folder: Path, *flags: str) -> dict[str, Any]:
    folder.mkdir()
    command = ["outlast", "run", "--plain", f"--run-dir={folder / 'run'}", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, "-m", *command, *flags, str(JOB), str(folder)],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="forked"),
        pytest.param(("--no-template",), id="spawned"),
    ],
)
@pytest.mark.extended
def test_a_replacement_does_not_empty_what_the_top_writes(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """The worker that replaces rank 0 is started for it, and runs the top in the middle."""
    undisturbed = run(tmp_path / "plain", *flags)
    assert undisturbed["lines"] == ["1", "2", "3", "4", "5", "6", "begin"]
    killed = run(tmp_path / "killed", "--fault=kill:rank=0,step=4,phase=backward", *flags)
    assert killed == undisturbed
    left = [each.name for each in (tmp_path / "killed").iterdir() if each.name.startswith(".")]
    assert left == []
