"""Job of two ranks whose top writes files above `outlast.init()`: `top_files_job FOLDER`.

Rank 0 writes a configuration, which it reads in each step and lowers now and then, and a log.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

import outlast

folder = Path(sys.argv[1])
config = folder / "config.json"
log = None
if os.environ.get("RANK") == "0":
    config.write_text(json.dumps({"rate": 0.1}))
    log = (folder / "log.txt").open("w")
    log.write("begin\n")
    log.flush()
    assert json.loads(config.read_text()) == {"rate": 0.1}

session = outlast.init()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_: int) -> float:
    rate = json.loads(config.read_text())["rate"] if session.rank == 0 else 1.0
    optimizer.zero_grad()
    loss = rate * model(torch.randn(5, 4)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


for index in session.batches(None, until=6):
    session.run(train_step, index)
    if log is not None:
        log.write(f"{session.step_index}\n")
        log.flush()
        if session.step_index == 2:
            config.write_text(json.dumps({"rate": 0.5}))
if session.rank == 0:
    weights = [parameter.tolist() for parameter in model.parameters()]
    lines = sorted(set((folder / "log.txt").read_text().split()))
    result = {"weights": weights, "lines": lines, "config": config.read_text()}
    (folder / "result.json").write_text(json.dumps(result))
