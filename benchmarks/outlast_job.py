"""The same workload under Outlast: the step is a function, and nothing is saved for failures."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from workload import BATCH, BLOCK, Baton, Ledger, Noise, Transformer, die_once, loss_of

import outlast

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--kill-at", type=int, default=0)
parser.add_argument("--small", type=int, default=0, help="small collectives to time at the end")
parser.add_argument("--baton", type=Path, help="take turns with the other job")
args = parser.parse_args()

torch.set_num_threads(1)
session = outlast.init()
ledger, baton = Ledger(args.folder, session.rank), Baton(args.baton, 1, session.rank)
torch.manual_seed(0)
model = DistributedDataParallel(Transformer())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = Noise()
sampler = DistributedSampler(data, session.world_size, session.rank, shuffle=False)
loader = DataLoader(data, BATCH, sampler=sampler)
session.protect(model=model, optimizer=optimizer, loader=loader)


def train_step(words: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss = loss_of(model, words)
    die_once(args.folder, session.rank, session.step_index + 1, at=args.kill_at)
    loss.backward()
    optimizer.step()


def small_collectives() -> float:
    one = torch.ones(1)
    dist.all_reduce(one)
    begin = time.monotonic()
    for _ in range(args.small):
        dist.all_reduce(one)
    return (time.monotonic() - begin) / args.small


for words in session.batches(loader, until=args.steps):
    if session.step_index % BLOCK == 0:
        baton.take()
    session.run(train_step, words)
    ledger.add(session.step_index)
    if session.step_index % BLOCK == 0:
        baton.give()
    if args.small and session.step_index == args.steps:
        baton.take()
        small_s = session.run(small_collectives)
        if session.rank == 1:
            (args.folder / "figures.json").write_text(json.dumps({"small_s": small_s}))
        baton.give()
