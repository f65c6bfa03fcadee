"""Job of test_part_reports.py under `outlast run`: `reporting_job FOLDER`.

Each rank writes to FOLDER/rank-RANK, by step, what `save` and `wait` raised and how long they took.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import outlast
from outlast.checkpoint import Checkpointer
from outlast.errors import OutlastError

folder = Path(sys.argv[1])
session = outlast.init()
root = folder / "root"
if session.rank == 1:
    root = folder / "link"
    if not root.exists():
        (folder / "root").mkdir(exist_ok=True)
        root.symlink_to(folder / "root")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saves = Checkpointer(root, complete=False, on_failure="raise", save_s=120.0)
session.protect(model=model, optimizer=optimizer)
heard: dict[str, list[str]] = {}


def train_step(_: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()


def save(step: int) -> str:
    try:
        saves.save(step, {"model": model, "optimizer": optimizer})
    except OutlastError as error:
        return str(error)
    return ""


def wait() -> str:
    try:
        saves.wait()
    except OutlastError as error:
        return str(error)
    return ""


for index in session.batches(None, until=6):
    session.run(train_step, index)
    step = session.step_index
    given = {2: step + session.rank, 3: True if session.rank == 1 else step}.get(step, step)
    if step == 4 and session.rank == 1:
        root.unlink()
    begin_s = time.monotonic()
    told = [session.run(save, given), wait()]
    heard[str(step)] = [*told, f"{time.monotonic() - begin_s:.1f}"]
    if step == 4 and session.rank == 1:
        root.symlink_to(folder / "root")
(folder / f"rank-{session.rank}").write_text(json.dumps(heard))
