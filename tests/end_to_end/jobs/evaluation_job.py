"""Script with two evaluations after its training loop."""

from __future__ import annotations

import argparse
import json
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


def train_step(batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


@torch.no_grad()
def evaluate() -> float:
    total = model(torch.ones(2, 4) * (1 + session.rank)).sum()
    dist.all_reduce(total)
    return total.item()


for batch in session.batches(list(torch.ones(4, 2, 4)), until=4):
    session.run(train_step, batch)
scores = [session.run(evaluate), session.run(evaluate)]
(args.out / f"{session.rank}.json").write_text(json.dumps(scores))
