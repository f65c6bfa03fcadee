"""Weights that a step first writes past the version counters late, where that step is retried, and
large values that a step first changes late, before a rank is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.scripts.script_catalogue import Script
from tests.scripts.script_runs import run_outlast, summary_of

WRITES = {
    "by_data": "parameter.data.mul_(0.5)",
    "by_numpy": "parameter.detach().numpy().__imul__(0.5)",
}
# Each parameter is larger than a window of a later phase; the last window is digested last.
SCRIPT = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(512, 512, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.protect(model=model, optimizer=optimizer)

def train_step(index):
    optimizer.zero_grad()
    if index == 6:
        for parameter in model.parameters():
            parameter = parameter[-1]
            WRITE
    model(torch.randn(5, 512)).square().mean().backward()
    optimizer.step()

for index in session.batches(None, until=9):
    session.run(train_step, index)
"""


@pytest.mark.process
@pytest.mark.catalogue
@pytest.mark.timeout(700)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_late_write_past_the_counters_is_refused_by_name(tmp_path: Path, write: str) -> None:
    path = tmp_path / "late_write.py"
    path.write_text(SCRIPT.replace("WRITE", write))
    # A successor digests all in its first phase; a retry has no successor.
    fault = "--fault=raise:rank=1,step=7,phase=backward"
    ended = run_outlast(Script(path, "late write"), tmp_path / "outlast", fault)
    assert ended.code == 1, ended.output
    assert "train_step" in ended.output and "before the vote" in ended.output, ended.output
    assert "model.module.weight" in ended.output
    assert summary_of(ended)["outcome"] == "user_error", ended.output


LIST = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.protect(model=model, optimizer=optimizer)
history = [0.0] * 50_000

def train_step(index):
    optimizer.zero_grad()
    if index == 6:
        history[index] += 1.0
    (model(torch.randn(5, 8)) * (1 + sum(history))).square().mean().backward()
    optimizer.step()

for index in session.batches(None, until=12):
    session.run(train_step, index)
"""


@pytest.mark.process
@pytest.mark.catalogue
@pytest.mark.timeout(700)
def test_a_large_list_that_first_changes_late_is_refused_after_a_kill(tmp_path: Path) -> None:
    """The successor's list would lack the change: the weights of all ranks would be others."""
    path = tmp_path / "late_list.py"
    path.write_text(LIST)
    fault = "--fault=kill:rank=1,step=9,phase=backward"
    ended = run_outlast(Script(path, "late list"), tmp_path / "outlast", fault)
    assert ended.code == 1, ended.output
    assert "history (list), which is not protected" in ended.output
    assert summary_of(ended)["outcome"] == "user_error", ended.output
