"""A script with Accelerate and a loop of its own loses ranks, and ends as under torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import Runner
from tests.integrations.framework_runs import must_equal, under_torchrun
from tests.integrations.framework_runs import runner as runner

pytest.importorskip("accelerate", reason="pip install accelerate==1.15.0")
pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
JOB = Path(__file__).with_name("jobs") / "accelerate_job.py"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return under_torchrun(JOB, tmp_path_factory.mktemp("plain"))


PLACES = [
    ("1:forward:13", "0:evaluation:8", "1:between:10"),
    pytest.param(("0:backward:9", "1:saved:0", "0:epoch:2"), marks=pytest.mark.extended),
]


@pytest.mark.parametrize("places", PLACES)
def test_a_killed_rank_is_replaced(
    runner: Runner, plain: list[dict[str, Any]], places: tuple[str, ...]
) -> None:
    outcome = runner.run("--spares=2", script=JOB, job=("--die", *places))
    must_equal(outcome, plain, len(places))


REFUSED = """
import torch
from accelerate import DataLoaderConfiguration
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration
from torch.utils.data import DataLoader
from outlast.integrations.accelerate_loop import OutlastAccelerator

accelerator = OutlastAccelerator(cpu=True, {options})
net = torch.nn.Linear(2, 1)
plain = DataLoader(torch.randn(8, 2), batch_size=2)
net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1), plain)

def train(batches):
    for batch in batches:
        with accelerator.accumulate(net):
            accelerator.backward(net(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()

for epoch in accelerator.epochs(2):
    for batches in accelerator.batches({loader}):
        accelerator.run(train, batches)
        {last}
"""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {
                "options": "project_config=ProjectConfiguration('.',"
                " automatic_checkpoint_naming=True)"
            },
            "automatic_checkpoint_naming",
        ),
        (
            {
                "options": "gradient_accumulation_plugin=GradientAccumulationPlugin(2,"
                " sync_with_dataloader=False)"
            },
            "sync_with_dataloader=False",
        ),
        ({"loader": "plain"}, "takes a loader that accelerator.prepare has returned"),
        ({"loader": "accelerator.skip_first_batches(loader, 1)"}, "takes a loader that"),
        ({"last": "accelerator.load_state('.')"}, "accelerator.load_state comes behind"),
        ({"last": "OutlastAccelerator(cpu=True)"}, "in which accelerate does"),
        ({"options": "rng_types=['torch', 'generator']"}, "rng_types="),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    parts = {"options": "", "loader": "loader", "last": "pass"}
    script, text = tmp_path / "script.py", REFUSED
    for name, value in (parts | changes).items():
        text = text.replace("{" + name + "}", value)
    script.write_text(text)
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    assert ran.returncode == 1
    assert words in ran.stderr, ran.stderr[-3000:]
