"""The same workload under Outlast: the step is a function, and nothing is saved for failures."""

from __future__ import annotations

import argparse
import json
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from workload import (
    SIZES,
    Baton,
    Ledger,
    Noise,
    add_flags,
    device_of,
    die_once,
    loss_of,
    parallel_model,
    wait_for,
)

import outlast

parser = argparse.ArgumentParser()
add_flags(parser)
parser.add_argument("--hot-spares", action="store_true")
parser.add_argument("--second", type=int, default=1, help="place in the turns: 0 before the other")
args = parser.parse_args()

torch.set_num_threads(1)
size = SIZES[args.size]
session = outlast.init(hot_spares=args.hot_spares)
device = device_of(args.device)
ledger, baton = Ledger(args.folder), Baton(args.baton, args.second, session.world_size)
model = parallel_model(args.parallel, size, device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = Noise(size.context)
count, rank = (1, 0) if args.parallel == "tp" else (None, None)  # None: those of the group
sampler = DistributedSampler(data, count, rank, shuffle=False)
loader = DataLoader(data, size.batch, sampler=sampler)
session.protect(model=model, optimizer=optimizer, loader=loader)


def train_step(words: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss = loss_of(model, words.to(device))
    if session.step_index + 1 == args.kill_at:
        die_once(args.folder, session.rank)
    loss.backward()
    optimizer.step()


def small_collectives() -> float:
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    begin = time.monotonic()
    for _ in range(args.small):
        dist.all_reduce(one)
    wait_for(device)
    return (time.monotonic() - begin) / args.small


for words in session.batches(loader, until=args.steps):
    if session.step_index % args.block == 0:
        baton.take()
    session.run(train_step, words)
    wait_for(device)
    ledger.add(session.rank, session.step_index)
    if session.step_index % args.block == 0:
        baton.give(session.rank)
    if args.small and session.step_index == args.steps:
        baton.take()
        small_s = session.run(small_collectives)
        if session.rank == 1:
            (args.folder / "figures.json").write_text(json.dumps({"small_s": small_s}))
        baton.give(session.rank)
