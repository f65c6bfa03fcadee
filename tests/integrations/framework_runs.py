"""Runs of frameworks' scripts under `outlast run`, and under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end import conftest
from tests.end_to_end.conftest import Outcome, Runner

from outlast.errors import EXIT_DONE

WORLD = 2


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    monkeypatch.setattr(conftest, "DEADLINE_S", 400.0)  # frameworks take their time to import
    run = Runner(tmp_path, WORLD)
    yield run
    for process in run.processes:
        if process.poll() is None:
            process.kill()
            process.wait(10)


def under_torchrun(script: Path, folder: Path, *job: str) -> list[dict[str, Any]]:
    """Return the results of a script's ranks under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={WORLD}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += [str(script), "--plain", f"--out={folder}", *job]
    subprocess.run(command, check=True, capture_output=True, env=environment, timeout=300)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


def must_equal(outcome: Outcome, plain: list[dict[str, Any]], incidents: int) -> None:
    """Check that a run has recovered from its incidents, and ended as under torchrun."""
    assert outcome.code == EXIT_DONE, outcome.output[-4000:]
    assert outcome.ranks == plain
    assert len(outcome.summary["incidents"]) == incidents, outcome.explain()
