"""What differs by rank is refused by name at the save where it first does, or is the rank's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
HERE = Path(__file__).parent


def test_two_ranks_that_are_not_alike(tmp_path: Path) -> None:
    script = HERE / "unlike_ranks.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, script, tmp_path, tmp_path / "store", str(rank), "2"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        out, _ = rank.communicate(timeout=240)
        assert rank.returncode == 0, out
    assert (tmp_path / "seen-0").exists() and (tmp_path / "seen-1").exists()
