"""Script that ends with destroy_process_group; rank 2 is lost after it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn

import outlast

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()
args.out.mkdir(exist_ok=True)

session = outlast.init()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model=model, optimizer=optimizer)


def train_step(batch: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


loss = 0.0
for batch in session.batches(list(torch.ones(4, 2, 4)), until=4):
    loss = session.run(train_step, batch)
dist.destroy_process_group()
(args.out / f"destroyed.{session.rank}").touch()
if session.rank == 2 and not (args.out / "died").exists():
    pause = threading.Event()
    while len(list(args.out.glob("destroyed.*"))) < session.world_size:
        pause.wait(0.02)
    (args.out / "died").touch()
    os.kill(os.getpid(), signal.SIGKILL)
result = {"loss": loss, "weight": model.module.weight.tolist()}
(args.out / f"{session.rank}.json").write_text(json.dumps(result))
