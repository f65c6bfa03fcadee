"""Contract of phases under `outlast run`: permanent errors end the run, others do not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process

JOB = Path(__file__).with_name("contract_job.py")


def run(run_dir: Path, *flags: str, job: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    command = [
        *(sys.executable, "-m", "outlast", "run", "--plain", "--nproc-per-node=2"),
        *(f"--run-dir={run_dir}", *flags, str(JOB), *job),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    output = done.stdout + done.stderr
    assert (run_dir / "summary.json").exists(), output
    return output, json.loads((run_dir / "summary.json").read_text())


def told(output: str) -> list[str]:
    said = (line.partition("rank ")[2] for line in output.splitlines())
    return sorted(line for line in said if line.startswith(("0: 6", "1: 6")))


BROKEN = {
    "enum": (("--fault", "kill:rank=1,step=5"), "[0].stage is a __main__.Stage"),
    "foreign group": ((), "UnsupportedError"),
    "own hook": ((), "would replace the dict that survives"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_contracts_end_the_run_with_their_cause(tmp_path: Path, what: str) -> None:
    flags, cause = BROKEN[what]
    output, summary = run(tmp_path / "run", *flags, job=("--do", what))
    assert summary["outcome"] == "user_error", output
    assert cause in output
    assert summary["respawns"] <= len(flags) // 2, output


@pytest.mark.long
def test_a_large_buffer_and_a_list_held_since_before_the_loop_survive(tmp_path: Path) -> None:
    keys = ("--keys", str(1 << 19))
    plain, summary = run(tmp_path / "plain", job=keys)
    assert summary["incidents"] == [], plain
    killed, summary = run(tmp_path / "killed", "--fault=kill:rank=1,step=4", job=keys)
    assert summary["outcome"] == "done", killed
    assert len(summary["incidents"]) == 1
    assert told(killed) == told(plain)
    assert len(told(plain)) == 2, plain


@pytest.mark.extended
def test_a_buffer_that_fits_no_slot_is_a_clear_end(tmp_path: Path) -> None:
    output, summary = run(tmp_path / "run", job=("--keys", str(5 << 20)))
    assert summary["outcome"] == "user_error", output
    assert "module.keys alone has 20971520" in output
    assert summary["respawns"] == 0


LATE_REPORTS = """
import torch, outlast
session = outlast.init()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
session.protect(model=model, optimizer=optimizer)
def train_step(index):
    optimizer.zero_grad()
    loss = model(torch.ones(1, 2)).square().mean()
    loss.backward()
    session.report(early=loss.item(), changed=0.0, unknown=float("nan"))
    optimizer.step()
    session.report(late=loss.item(), changed=1.0, unknown=float("nan"))
for index in session.batches(None, until=4):
    session.run(train_step, index)
"""


@pytest.mark.extended
def test_a_report_after_the_optimizers_step_is_noted(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(LATE_REPORTS)
    command = [sys.executable, "-m", "outlast", "run", "--plain", f"--run-dir={tmp_path / 'run'}"]
    subprocess.run([*command, "--nproc-per-node=2", str(script)], timeout=150, check=True)
    notes = json.loads((tmp_path / "run" / "summary.json").read_text())["notes"]
    late = [note for note in notes if "before optimizer.step()" in note]
    assert ["reports changed, late after" in note for note in late] == [True, True], notes
