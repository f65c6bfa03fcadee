"""Three ranks that broadcast 128 MB from rank 1 in each step. In step 5 rank 1 is killed once, in
the middle of a message: `large_broadcast_job --out OUT [--kill]`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import outlast

STEPS, KILL_AT, PART_BYTES = 7, 5, 16 << 20

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--kill", action="store_true")
args = parser.parse_args()
args.out.mkdir(exist_ok=True)

session = outlast.init()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model=model, optimizer=optimizer)


def written_bytes() -> int:
    return int(Path("/proc/self/io").read_text().partition("wchar: ")[2].split()[0])


def die_in_the_middle() -> None:
    begin = written_bytes()
    while written_bytes() < begin + PART_BYTES:
        os.sched_yield()
    os.kill(os.getpid(), signal.SIGKILL)


def train_step(step: int) -> float:
    large = torch.full((32 << 20,), step if session.rank == 1 else -1, dtype=torch.float32)
    mark = args.out / "killed"
    if args.kill and session.rank == 1 and session.step_index + 1 == KILL_AT and not mark.exists():
        mark.touch()
        threading.Thread(target=die_in_the_middle, daemon=True).start()
    dist.broadcast(large, 1)
    optimizer.zero_grad()
    loss = (model(torch.ones(3, 4)) + large[-1] / STEPS).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


losses = []
for step in session.batches(None, until=STEPS):
    loss = session.run(train_step, step)
    losses.append(loss)
(args.out / f"{session.rank}.json").write_text(json.dumps(losses))
