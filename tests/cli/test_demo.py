"""`outlast demo`: four faults, equal bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from outlast.cli.demo import FAULTS, DemoReport
from outlast.config import child_environment


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.timeout(300)
def test_the_demo_ends_with_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", "outlast", "demo", "--steps=20", "--json", f"--run-dir={tmp_path}"],
        cwd=tmp_path,
        env=child_environment({}),
        capture_output=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    report = msgspec.json.decode(done.stdout, type=DemoReport)
    found = report.comparison
    assert found.equal
    assert found.steps == (20, 20)
    assert found.losses == (80, 80), "every rank reports every step"
    assert found.faults_struck == len(FAULTS)
    assert [line.state for line in report.disturbed.incidents] == ["recovered"] * len(FAULTS)
    assert report.disturbed.committed_steps_lost == 0
    assert report.undisturbed.incidents == ()
    assert (tmp_path / "report.svg").read_text().startswith("<?xml")


@pytest.mark.process
def test_a_demo_is_not_mixed_into_another(tmp_path: Path) -> None:
    (tmp_path / "disturbed").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "outlast", "demo", f"--run-dir={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "holds a demo already" in " ".join(done.stderr.replace("│", " ").split())
