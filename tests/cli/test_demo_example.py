"""The demo's example: shipped, deterministic, and within reach of its faults."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outlast.cli.demo import DIGEST, FAULTS, STEPS_MIN, example
from outlast.config import child_environment
from outlast.controller.fault_spec import parse


def alone(folder: Path) -> str:
    """The example under plain `python`, small; its digest."""
    flags = ["--steps=4", "--width=32", "--layers=1", "--evaluate-every=2"]
    done = subprocess.run(
        [sys.executable, str(example()), *flags],
        cwd=folder,
        env=child_environment({"OMP_NUM_THREADS": "1"}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "step 4: loss" in done.stdout
    return DIGEST.findall(done.stdout)[-1]


@pytest.mark.extended
@pytest.mark.process
def test_the_example_trains_alone_to_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert alone(tmp_path) == alone(tmp_path)
    assert list(tmp_path.iterdir()) == [], "a run without a launcher leaves no files"


def test_the_faults_of_the_demo_are_in_reach() -> None:
    """Each names another step, all inside the shortest demo, so that all four strike."""
    steps = [parse(text.format(step=round(part * STEPS_MIN))).step for part, text in FAULTS]
    assert steps == sorted(set(steps))
    assert steps[0] >= 2
    assert steps[-1] < STEPS_MIN
