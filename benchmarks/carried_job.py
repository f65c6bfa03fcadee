"""A job whose phase changes variables that nobody protects; it writes down each step's cost."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import outlast

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--kind", choices=("numbers", "list", "dict", "array"), required=True)
parser.add_argument(
    "--count", type=int, required=True, help="numbers, or elements of one container"
)
args = parser.parse_args()
ROW = 100


class Meter:
    """One number of the script's."""

    def __init__(self) -> None:
        self.total = 0.0


torch.set_num_threads(1)
session = outlast.init()
(args.folder / "ledger").touch()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
session.protect(model=model, optimizer=optimizer)
of_kind = {kind: args.count * (args.kind == kind) for kind in ("numbers", "list", "dict", "array")}
meters = [
    [Meter() for _ in range(min(ROW, of_kind["numbers"] - first))]
    for first in range(0, of_kind["numbers"], ROW)
]
history = [0.0] * of_kind["list"]
table = {str(number): 0.0 for number in range(of_kind["dict"])}
array = np.zeros(of_kind["array"], np.float32)


def train_step(step: int) -> None:
    optimizer.zero_grad()
    loss = model(torch.ones(1, 4)).sum()
    loss.backward()
    for row in meters:
        for meter in row:
            meter.total += 1.0
    if history:
        history[step % len(history)] += 1.0
    if table:
        table[str(step % len(table))] += 1.0
    if len(array):
        array[step % len(array)] += 1.0
    optimizer.step()


costs: list[float] = []
begin = time.thread_time()
for _ in session.batches(None, until=args.steps):
    session.run(train_step, session.step_index)
    now = time.thread_time()
    costs.append(now - begin)
    begin = now
(args.folder / "figures.json").write_text(json.dumps({"costs_s": costs}))
