"""Job of two ranks with operations that a session refuses or must carry."""

from __future__ import annotations

import argparse
import enum
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import nn

import outlast


class Stage(enum.Enum):
    WARM = 1


class Keys(nn.Module):
    """Module that writes a large buffer in forward, as MoCo does with its queue of keys."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(size))
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            keys = self.get_buffer("keys")
            keys.copy_(keys.roll(1) + x.sum())
        return self.linear(x)


def silent_hook(*_: Any) -> None:
    print("told by the script's own hook", flush=True)


parser = argparse.ArgumentParser()
parser.add_argument("--do", default="")
parser.add_argument("--keys", type=int, default=1)
args = parser.parse_args()

session = outlast.init()
history = session.state.setdefault("history", [])
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Keys(args.keys))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model=model, optimizer=optimizer)
if args.do == "own hook":
    sys.excepthook = silent_hook


def evaluate() -> None:
    with torch.no_grad():
        model.eval()
        model(torch.ones(1, 4))
        model.train()


def step(index: int) -> float:
    optimizer.zero_grad()
    loss = model(torch.full((2, 4), 0.1 * index + session.rank)).pow(2).mean()
    loss.backward()
    if args.do == "foreign group":
        store = torch.distributed.distributed_c10d._get_default_store()
        torch.distributed.ProcessGroupGloo(store, session.rank, 2, timedelta(seconds=30))
    optimizer.step()
    return loss.item()


session.run(evaluate)
for index in session.batches(None, until=6):
    history.append(session.run(step, index))
    if index == 2 and args.do == "enum":
        optimizer.param_groups[0]["stage"] = Stage.WARM
    if index == 2 and args.do == "own hook" and session.rank == 1:
        session.state = {}
assert session.state["history"] is history
weight = model.module.linear.weight.sum().item() + model.module.get_buffer("keys").sum().item()
print(f"rank {session.rank}:", len(history), history[-1], weight, flush=True)
