"""Training job that keeps no rank of its own above its loop, unless it is told to break that."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import threading
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast

HOLD_AT = 5

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--hold", type=Path, help="wait for this file behind step 5")
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--gate", type=Path, help="while it is there no model is built, steps are slow")
parser.add_argument("--lie", default="", help="where the script depends on its rank after all")
parser.add_argument("--compiled", action="store_true")
args = parser.parse_args()


class Counted(TensorDataset):
    """A dataset that counts its reads, whose count changes what it returns."""

    reads = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        self.reads += 1
        noise = 0.1 * torch.randn(16) + 0.001 * self.reads
        return (self.tensors[0][index] + noise, self.tensors[1][index])


def is_shut() -> bool:
    return args.gate is not None and args.gate.exists()


session = outlast.init(hot_spares=True)
while is_shut():
    threading.Event().wait(0.01)
torch.manual_seed(1)
scale = 1.0
if args.lie == "branch" and dist.get_rank() == 1:
    scale = 2.0
if args.lie == "variable":
    scale = 1.0 + int(os.environ["RANK"])
net = nn.Sequential(
    nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4)
)
model = nn.parallel.DistributedDataParallel(net)
called = torch.compile(model, backend="aot_eager") if args.compiled else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
dice = torch.Generator().manual_seed(3)
data = Counted(torch.randn(256, 16, generator=dice), torch.randn(256, 4, generator=dice))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
session.protect(model=model, optimizer=optimizer, loader=loader)


def train_step(batch: list[torch.Tensor]) -> float:
    x, y = batch
    optimizer.zero_grad()
    loss = (scale * (called(x) - y) ** 2).mean()
    loss.backward()
    if is_shut():
        threading.Event().wait(0.1)
    optimizer.step()
    return loss.item()


losses = []
for batch in session.batches(loader, until=args.steps):
    losses.append(session.run(train_step, batch))
    if args.hold and session.step_index == HOLD_AT:
        args.hold.with_suffix(f".{session.rank}").touch()
        while not args.hold.exists():
            threading.Event().wait(0.01)

digest = hashlib.sha256(repr(losses).encode())
for value in (*model.state_dict().values(), torch.get_rng_state()):
    digest.update(value.numpy().tobytes())
for state in optimizer.state_dict()["state"].values():
    for value in state.values():
        digest.update(value.numpy().tobytes())
args.out.mkdir(exist_ok=True)
(args.out / f"{session.rank}.json").write_text(json.dumps({"digest": digest.hexdigest()}))
