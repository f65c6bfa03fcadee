"""SIGKILL during a save, at random times and at every change of a name: the newest always loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


def run(root: Path, *arguments: str) -> str:
    saver = Path(__file__).parent / "saver.py"
    done = subprocess.run(
        [sys.executable, str(saver), str(root), *arguments],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_killed_at_random_times(tmp_path: Path) -> None:
    out = run(tmp_path, "times", "40", "0")
    assert out.startswith("40 lives")
    assert int(out.split()[-1]) > 1, "no save was ever complete"


def test_killed_at_every_change(tmp_path: Path) -> None:
    lives = int(run(tmp_path, "points").split()[0])
    assert lives > 20
