"""The benchmark of a machine with a GPU, on processors and in small: that it works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.extended, pytest.mark.timeout(600)]
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
SMALL = ("--size=1ms", "--repeats=1", "--turns=3", "--small=20", "--size-mb=20", "--saves=2")


def test_every_part_is_measured_and_recorded(tmp_path: Path) -> None:
    """Times of a machine with other work prove nothing: the count of lost steps is compared."""
    page = tmp_path / "page.md"
    page.write_text("# Page\n")
    command = [sys.executable, BENCHMARK, "--device=cpu", *SMALL, f"--folder={tmp_path}"]
    result = subprocess.run(
        [*command, f"--record={page}"], capture_output=True, text=True, timeout=500, check=False
    )
    assert result.returncode in {0, 1}, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert result.returncode == (0 if found["all_met"] else 1)
    assert found["bars"]["committed steps lost"]["met"]
    measured = found["figures"].keys() - {"ran", "load"}
    recorded = page.read_text()
    assert recorded.startswith("# Page\n") and "failed" not in recorded, recorded
    for name in measured:
        assert f"| {name} |" in recorded
    for name in ("torchrun, s", "hot spare / torchrun", "step / plain DDP", "a save blocks / copy"):
        assert found["figures"][name][0] > 0
