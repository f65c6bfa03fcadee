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


ACCUMULATED = [
    ("1:batch2:2", "0:evaluation:4"),
    pytest.param(("1:backward:3", "0:substep3:4", "0:saved:4"), marks=pytest.mark.extended),
]


@pytest.mark.parametrize("places", ACCUMULATED)
def test_accumulated_batches_are_one_step(
    runner: Runner, tmp_path_factory: pytest.TempPathFactory, places: tuple[str, ...]
) -> None:
    accumulate = ("--accumulate=4",)  # of 6 batches: the last step of an epoch has two
    plain = under_torchrun(JOB, tmp_path_factory.mktemp("accumulated"), *accumulate)
    job = (*accumulate, "--die", *places)
    must_equal(runner.run("--spares=2", script=JOB, job=job), plain, len(places))


@pytest.mark.extended
def test_a_nan_is_run_again(runner: Runner, plain: list[dict[str, Any]]) -> None:
    outcome = runner.run("--fault=nan:rank=1,step=5", script=JOB)
    must_equal(outcome, plain, 0)  # it is redone in place, without an incident
    assert "nonfinite" in outcome.explain()


REFUSED = """
import torch
from transformers import TrainerCallback, TrainingArguments
from outlast.integrations.hugging_face_trainer import OutlastTrainer

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
    def forward(self, x, labels=None):
        return {"loss": self.net(x).square().mean()}

class Stopping(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        control.should_training_stop = True

args = TrainingArguments("out", use_cpu=True, max_steps=2, save_strategy="no", report_to=[],
                         {options})
data = [{"x": torch.ones(2), "labels": 0} for _ in range(8)]
OutlastTrainer(Model(), args, train_dataset=data, callbacks=[Stopping()]).train()
"""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("accelerator_config={'use_seedable_sampler': False}", "use_seedable_sampler=False"),
        (
            "gradient_accumulation_steps=2, per_device_train_batch_size=2",
            "stops training behind batch 1 of the 2 of a step",
        ),
    ],
)
def test_refused_by_name(tmp_path: Path, options: str, words: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(REFUSED.replace("{options}", options))
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    assert ran.returncode == 1
    assert words in ran.stderr, ran.stderr[-3000:]
