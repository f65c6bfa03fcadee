"""A script with Hugging Face's Trainer loses ranks, and ends as under torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import Runner
from tests.integrations.framework_runs import must_equal, under_torchrun
from tests.integrations.framework_runs import runner as runner

pytest.importorskip("transformers", reason="pip install transformers==5.24.0 accelerate==1.15.0")
pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
JOB = Path(__file__).with_name("jobs") / "hugging_face_job.py"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return under_torchrun(JOB, tmp_path_factory.mktemp("plain"))


PLACES = [
    ("0:step_end:3", "1:evaluated:8", "0:backward:13"),
    pytest.param(("1:forward:4", "0:evaluation:8"), marks=pytest.mark.extended),
    pytest.param(("1:step_begin:7", "0:epoch_begin:6", "1:saved:12"), marks=pytest.mark.extended),
]


@pytest.mark.parametrize("places", PLACES)
def test_a_killed_rank_is_replaced(
    runner: Runner, plain: list[dict[str, Any]], places: tuple[str, ...]
) -> None:
    outcome = runner.run(f"--spares={len(places)}", script=JOB, job=("--die", *places))
    must_equal(outcome, plain, len(places))


@pytest.mark.extended
def test_a_nan_is_run_again(runner: Runner, plain: list[dict[str, Any]]) -> None:
    outcome = runner.run("--fault=nan:rank=1,step=5", script=JOB)
    must_equal(outcome, plain, 0)  # it is redone in place, without an incident
    assert "nonfinite" in outcome.explain()


REFUSED = """
import torch
from transformers import TrainingArguments
from outlast.integrations.hugging_face_trainer import OutlastTrainer

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
    def forward(self, x, labels=None):
        return {"loss": self.net(x).square().mean()}

args = TrainingArguments("out", use_cpu=True, max_steps=2, save_strategy="no", report_to=[],
                         gradient_accumulation_steps=2)
data = [{"x": torch.ones(2), "labels": 0} for _ in range(8)]
OutlastTrainer(Model(), args, train_dataset=data).train()
"""


def test_gradient_accumulation_is_refused_by_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(REFUSED)
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    assert ran.returncode == 1
    assert "gradient_accumulation_steps: batches before the one" in ran.stderr, ran.stderr[-3000:]
