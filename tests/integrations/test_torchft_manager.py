"""A script written for torchft, with changed imports, loses ranks, and ends as without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end import conftest
from tests.end_to_end.conftest import Runner
from tests.integrations.framework_runs import WORLD, must_equal
from tests.integrations.framework_runs import runner as runner

pytest.importorskip("greenlet", reason="pip install greenlet==3.5.6")
pytest.importorskip("torchdata", reason="pip install torchdata==0.11.0")
pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
JOB = Path(__file__).with_name("jobs") / "torchft_job.py"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conftest, "DEADLINE_S", 400.0)
        outcome = Runner(tmp_path_factory.mktemp("undisturbed"), WORLD).run(script=JOB)
    assert outcome.code == 0, outcome.output[-4000:]
    assert outcome.ranks[0]["batches"] == 2 * outcome.ranks[0]["steps"] == 40
    return outcome.ranks


PLACES = [
    ("1:forward:4", "0:backward:7", "1:draw:11"),
    pytest.param(("0:draw:0", "1:draw:9"), marks=pytest.mark.extended),
]


@pytest.mark.parametrize("places", PLACES)
def test_a_killed_rank_is_replaced(
    runner: Runner, undisturbed: list[dict[str, Any]], places: tuple[str, ...]
) -> None:
    outcome = runner.run(f"--spares={len(places)}", script=JOB, job=("--die", *places))
    must_equal(outcome, undisturbed, len(places))
    printed = [line for line in outcome.output.splitlines() if " loss = " in line]
    assert len(printed) == len({*printed}) == 8  # a refused body prints nothing behind its step


def test_a_rank_that_dies_behind_its_step_rolls_the_job_back(
    runner: Runner, undisturbed: list[dict[str, Any]]
) -> None:
    outcome = runner.run("--spares=2", script=JOB, job=("--die", "1:reduced:6"))
    must_equal(outcome, undisturbed, 2)
    assert "reads weights between a draw and a step" in " ".join(outcome.explain().split())


@pytest.mark.extended
def test_a_nan_is_run_again(runner: Runner, undisturbed: list[dict[str, Any]]) -> None:
    outcome = runner.run("--fault=nan:rank=1,step=5", script=JOB)
    must_equal(outcome, undisturbed, 0)
    assert "nonfinite" in outcome.explain()


def test_an_undisturbed_run_equals_torchft(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    pytest.importorskip("torchft", reason="pip install torchft-nightly==2026.10.26")
    programs = Path(sys.executable).parent
    address = "[::]:29613"
    lighthouse = subprocess.Popen(
        [programs / "torchft_lighthouse", f"--min_replicas={WORLD}", f"--bind={address}"]
    )
    variables = {
        **os.environ,
        "TORCHFT_LIGHTHOUSE": "http://localhost:29613",
        "NUM_REPLICA_GROUPS": str(WORLD),
        "OMP_NUM_THREADS": "1",
    }
    torchrun = (sys.executable, "-m", "torch.distributed.run")
    groups = [
        subprocess.Popen(
            [*torchrun, f"--master-port={29614 + group}", JOB, "--torchft", f"--out={tmp_path}"],
            env={**variables, "REPLICA_GROUP_ID": str(group)},
        )
        for group in range(WORLD)
    ]
    try:
        assert [group.wait(200) for group in groups] == [0] * WORLD
    finally:
        for process in (*groups, lighthouse):
            process.kill()
            process.wait(10)
    for rank, ours in enumerate(undisturbed):
        theirs = json.loads((tmp_path / f"{rank}.json").read_text())
        for name in ("total", "rates", "steps", "batches"):
            assert ours[name] == theirs[name]
        if rank == 0:  # BatchNorm's buffers of others are rank 0's here, their own in torchft
            assert ours["weights"] == theirs["weights"]
            assert ours["average"] == theirs["average"]


SCRIPT = """
import torch
from torch import nn
from outlast.integrations.torchft_manager import *
from outlast.integrations import torchft_manager as torchft

data = torch.utils.data.TensorDataset(torch.ones(8, 2))
loader = DataLoader(data, batch_size=2)
manager = Manager({options})
model = DistributedDataParallel(manager, nn.Linear(2, 1))
optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))

def step(batch):
    optimizer.zero_grad()
    model(batch[0]).mean().backward()
    optimizer.step()

{loop}
"""
PLAIN = "for batch in loader: step(batch)"
REFUSED = {
    "LocalSGD has no meaning": ("", "torchft.LocalSGD"),
    "ProcessGroupBabyGloo has no meaning": ("", "torchft.ProcessGroupBabyGloo"),
    "min_replica_size=2 in a job of 1": ("min_replica_size=2", PLAIN),
    "replica groups of several ranks": ("rank=1, world_size=2", PLAIN),
    "Manager(init_quorum=...), which": ("init_quorum=True", PLAIN),
    "max_retries": ("max_retries=3", PLAIN),
    "replica_id='group_3' in rank 0": ("replica_id='group_3'", PLAIN),
    "`for epoch in range(2)` around": ("", f"for epoch in range(2):\n    {PLAIN}"),
    "`enumerate` around the loader counts `i`": (
        "",
        "for i, batch in enumerate(loader):\n    step(batch)\n    print(i)",
    ),
    "manager.protect comes behind": (
        "",
        "for batch in loader:\n    step(batch)\n    manager.protect(other=nn.Linear(1, 1))",
    ),
    "this manager itself names model": ("", f"manager.protect(model=model)\n{PLAIN}"),
    "a second Optimizer": ("", "Optimizer(manager, optimizer.optim)"),
    "optimizer.step() outside of a loop": ("", "step(next(iter(data)))"),
    "has ended without optimizer.step()": ("", "for batch in loader: pass"),
    "inside another": ("", "for batch in loader:\n    for other in loader: pass"),
    "optimizer.step(closure)": ("", "for batch in loader: optimizer.step(lambda: 0)"),
    "loader.state_dict() would keep": ("", "loader.state_dict()"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_has_no_meaning_is_refused_by_name(tmp_path: Path, text: str) -> None:
    options, loop = REFUSED[text]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(options=options, loop=loop))
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert ran.returncode == 1
    assert text in ran.stderr, ran.stderr[-3000:]
