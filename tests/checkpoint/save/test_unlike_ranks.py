"""Refusal by name of saves whose ranks differ, or support as rank-local state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
REPOSITORY = Path(__file__).parents[3]


@pytest.mark.extended
def test_two_ranks_that_are_not_alike(tmp_path: Path) -> None:
    script = "tests.checkpoint.save.unlike_ranks"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", script, tmp_path, tmp_path / "store", str(rank), "2"],
            cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    assert (tmp_path / "seen-0").exists() and (tmp_path / "seen-1").exists()
