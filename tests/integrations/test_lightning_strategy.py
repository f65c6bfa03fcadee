"""A Lightning script with one changed argument loses ranks, and ends as under torchrun."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import Runner
from tests.integrations.framework_runs import must_equal, under_torchrun
from tests.integrations.framework_runs import runner as runner

pytest.importorskip("lightning", reason="pip install lightning==2.6.6")
pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(600),
]
JOB = Path(__file__).with_name("jobs") / "lightning_job.py"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return under_torchrun(JOB, tmp_path_factory.mktemp("plain"))


PLACES = [
    ("1:forward:4", "0:batch_end:9"),
    ("1:validation:3", "0:validation_end:9"),
    pytest.param(("0:backward:7", "1:batch_start:8"), marks=pytest.mark.extended),
    pytest.param(
        ("0:epoch_start:6", "1:epoch_end:12", "1:validation:18"), marks=pytest.mark.extended
    ),
]


@pytest.mark.parametrize("places", PLACES)
def test_a_killed_rank_is_replaced(
    runner: Runner, plain: list[dict[str, Any]], places: tuple[str, ...]
) -> None:
    outcome = runner.run(f"--spares={len(places)}", script=JOB, job=("--die", *places))
    must_equal(outcome, plain, len(places))
    with (outcome.out / "csv" / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps[0] < 4  # a new worker of rank 0 has appended to the rows of the lost one
    assert (outcome.out / "prepared").exists()


def test_a_nan_is_run_again(runner: Runner, plain: list[dict[str, Any]]) -> None:
    outcome = runner.run("--fault=nan:rank=1,step=5", script=JOB)
    must_equal(outcome, plain, 0)  # it is redone in place, without an incident
    assert "nonfinite" in outcome.explain()


@pytest.mark.extended
def test_manual_optimization_steps_twice(
    runner: Runner, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plain = under_torchrun(JOB, tmp_path_factory.mktemp("manual"), "--manual")
    outcome = runner.run("--spares=1", script=JOB, job=("--manual", "--die", "1:forward:4"))
    must_equal(outcome, plain, 1)


ACCUMULATED = [
    ("1:batch1:2", "0:backward:3", "0:validation_end:5"),
    pytest.param(("0:end1:2", "0:batch_end:4", "1:batch_start:5"), marks=pytest.mark.extended),
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
def test_manual_optimization_accumulates(
    runner: Runner, tmp_path_factory: pytest.TempPathFactory
) -> None:
    manual = ("--manual", "--accumulate=4")
    plain = under_torchrun(JOB, tmp_path_factory.mktemp("manual"), *manual)
    outcome = runner.run("--spares=1", script=JOB, job=(*manual, "--die", "1:batch2:2"))
    must_equal(outcome, plain, 1)


REFUSED = """
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Timer
from torch.utils.data import DataLoader
from outlast.integrations.lightning_strategy import OutlastStrategy

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()
    def validation_step(self, batch, batch_idx):
        pass
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class ByHand(Model):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()

class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.randn(2)

class Drawing(Callback):
    def on_train_start(self, *args):
        torch.randn(1)

class Stopping(Callback):
    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = True

trainer = Trainer(strategy=OutlastStrategy(), accelerator="cpu", max_epochs=1, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, {options})
loader = DataLoader(torch.randn(8, 2), batch_size=2)
trainer.fit({model}(), {loader})
{last}
"""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"options": "accumulate_grad_batches=2, callbacks=[Timer('00:01:00:00')]"},
            ("Timer",),
        ),
        ({"loader": "[loader, loader]"}, ("several training loaders",)),
        ({"last": "trainer.fit(Model(), loader)"}, ("trainer.fit comes behind the training",)),
        ({"last": "OutlastStrategy()"}, ("in which lightning does",)),
        (
            {
                "options": "accumulate_grad_batches=2, val_check_interval=3",
                "loader": "loader, loader",
            },
            ("val_check_interval=3 with 2 batches a step",),
        ),
        (
            {"options": "accumulate_grad_batches=2", "loader": "DataLoader(Noise())"},
            ("draw from generators of the process (torch)",),
        ),
        (
            {"options": "accumulate_grad_batches=2, callbacks=[Stopping()]"},
            ("the end of training, comes between the 2 batches",),
        ),
        ({"options": "callbacks=[Drawing()]"}, ("the loader's seed would come behind that draw",)),
        ({"options": "reload_dataloaders_every_n_epochs=1"}, ("opens such a loader twice",)),
        ({"model": "ByHand"}, ("steps with a gradient",)),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, str], words: tuple[str, ...]) -> None:
    script, text = tmp_path / "script.py", REFUSED
    script_parts = {"options": "", "loader": "loader", "model": "Model", "last": ""} | changes
    for name, value in script_parts.items():
        text = text.replace("{" + name + "}", value)
    script.write_text(text)
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    assert ran.returncode == 1
    assert all(word in ran.stderr for word in words), ran.stderr[-3000:]
