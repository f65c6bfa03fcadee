"""Scripts that read their rank and make the process group above `outlast.init()`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.end_to_end.conftest import Runner

pytestmark = pytest.mark.process
JOB = Path(__file__).with_name("jobs") / "early_group_job.py"


def results(out: Path) -> list[list[object]]:
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    "flags", [(), pytest.param(("--no-template",), marks=pytest.mark.extended)]
)
def test_a_script_that_keeps_its_first_lines_ends_as_under_torchrun(
    tmp_path: Path, runner: Runner, flags: tuple[str, ...]
) -> None:
    plain = tmp_path / "plain"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [*command, str(JOB), f"--out={plain}", "--plain"]
    subprocess.run(words, check=True, timeout=100, capture_output=True)
    runner.world = 2
    faults = ("--fault=kill:rank=0,step=4,phase=backward", "--fault=kill:rank=1,step=8")
    outcome = runner.run("--spares=1", *faults, *flags, script=JOB)
    assert outcome.code == 0, outcome.output
    assert results(outcome.out) == results(plain)
    rungs = [i["rung"] for i in outcome.summary["incidents"]]
    assert rungs[0] == "replace", "the first spare waited at the line that reads RANK"
    assert "code above outlast.init() reads RANK" in outcome.output


HIDDEN = """
import os
import torch
rank = int(os.environ.get("RANK", "0"))
import session_of_the_library
session_of_the_library.train(rank)
"""
LIBRARY = """
import pathlib
import threading
import torch
import outlast
def train(rank):
    spares = pathlib.Path(__file__).parent / "run" / "logs" / "spare"
    session = outlast.init()
    assert rank == session.rank
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.protect(model=model, optimizer=optimizer)
    for step in session.batches(None, until=5):
        session.run(optimizer.step)
        while step == 2 and len(list(spares.glob("*"))) < 2:  # another spare is started
            threading.Event().wait(0.05)
"""


def test_a_spare_that_would_go_on_as_another_rank_ends_by_name(
    runner: Runner, tmp_path: Path
) -> None:
    (tmp_path / "hidden.py").write_text(HIDDEN)
    (tmp_path / "session_of_the_library.py").write_text(LIBRARY)
    limits = ("--limit=hang_floor_s=60", "--spares=1")
    outcome = runner.run(*limits, script=tmp_path / "hidden.py")
    assert outcome.code == 0, outcome.output
    assert "before outlast.init(), where a spare has no rank yet" in outcome.output
    logs = outcome.run_dir.glob("logs/spare/*/stderr.log")  # torch 2.15 writes more at its exit
    assert any("has read RANK" in log.read_text() for log in logs)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ('"mpi"', "not mpi"),
        ('"gloo", world_size=7, rank=0', "gives 7"),
        ('"gloo", store=torch.distributed.HashStore(), rank=0, world_size=2', "store=..."),
    ],
)
def test_another_group_than_the_jobs_is_refused(
    runner: Runner, tmp_path: Path, words: str, cause: str
) -> None:
    script = tmp_path / "other.py"
    script.write_text(
        f"import outlast, torch\nsession = outlast.init()\n"
        f"torch.distributed.init_process_group({words})\n"
    )
    outcome = runner.run(script=script)
    assert outcome.code == 1, outcome.output
    assert "UsageError" in outcome.output and cause in outcome.output
