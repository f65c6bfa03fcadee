"""Writes to local variables of running frames leave the interpreter intact."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STRESS = Path(__file__).with_name("frame_writes.py")


@pytest.mark.parametrize("rounds", [300, pytest.param(20_000, marks=pytest.mark.long)])
def test_frames_are_written_thousands_of_times(rounds: int) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-X", "faulthandler", str(STRESS), str(rounds)],
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "frame_writes\n"), done.stderr
