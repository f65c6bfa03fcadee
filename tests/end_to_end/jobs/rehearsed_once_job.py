"""Two ranks of which rank 1 dies once, when both have rehearsed the step once and not twice:
`rehearsed_once_job --out OUT [--kill]`."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outlast

STEPS = 6
CLOSED_S = 2.0  # until the generation is closed for certain

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--kill", action="store_true")
args = parser.parse_args()
args.out.mkdir(exist_ok=True)
mark, between = args.out / "killed", args.out / "between"


def called(rank: int) -> Path:
    return args.out / f"called-{rank}"


def wait_for(path: Path) -> None:
    while not path.exists():
        threading.Event().wait(0.01)


class Meter:
    """An object of which a copy is taken between two attempts, which takes a while then."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        """Let rank 1 die between its first two attempts, while rank 0 stands between its own."""
        is_between = any(frame.function == "_begin" for frame in inspect.stack())
        if args.kill and is_between and called(session.rank).exists() and not mark.exists():
            if session.rank == 1:
                wait_for(between)
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            between.touch()
            wait_for(mark)
            threading.Event().wait(CLOSED_S)
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the count."""
        self.count = state["count"]


session = outlast.init()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
meter = Meter()
session.protect(model=model, optimizer=optimizer, meter=meter)


def train_step() -> float:
    optimizer.zero_grad()
    loss = (model(torch.randn(3, 4)) + session.rank).square().mean()
    loss.backward()
    called(session.rank).touch()
    meter.count += 1
    optimizer.step()
    return loss.item()


losses = []
for _ in session.batches(None, until=STEPS):
    loss = session.run(train_step)
    losses.append(loss)
(args.out / f"{session.rank}.json").write_text(json.dumps([*losses, meter.count]))
