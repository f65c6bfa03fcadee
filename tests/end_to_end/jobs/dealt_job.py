"""Training job over a loader of tests/data/dealt_kinds.py that logs the samples of each rank."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from pathlib import Path

import torch
from torch import nn

import outlast

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tests.data.dealt_kinds import DEALT
from tests.integrations.stream_kinds import make_loader

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path, nargs="?")
parser.add_argument("--out", type=Path)
parser.add_argument("--kind", default="DataLoader")
parser.add_argument("--data", type=Path, help="of a kind of tests/integrations/stream_kinds.py")
parser.add_argument("--samples", type=int, default=90)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--pace", type=float, default=0.0, help="seconds a step")
parser.add_argument("--gate", type=Path, help="made at step 2: workers wait while it is there")
args = parser.parse_args()
args.out = args.out or args.folder
args.out.mkdir(exist_ok=True)
while args.gate and args.gate.exists():
    threading.Event().wait(0.02)
session = outlast.init()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if args.data:
    loader = make_loader(args.kind, args.data, args.workers)
else:
    loader = DEALT[args.kind](
        args.samples, session.world_size, session.rank, 3, num_workers=args.workers
    )
session.protect(model=model, optimizer=optimizer, loader=loader)


def train_step(index: torch.Tensor) -> float:
    x = (index[:, None] / 90).expand(-1, 6)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), index % 3)
    loss.backward()
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    optimizer.step()
    return float(mean) / session.world_size


losses: list[float] = []
with (args.out / f"{session.rank}.{os.getpid()}.jsonl").open("a") as samples:
    for batch in session.batches(loader, epochs=args.epochs):
        threading.Event().wait(args.pace)
        step = session.step_index
        if args.gate and step == 2:
            args.gate.touch()
        losses.append(session.run(train_step, torch.as_tensor(batch)))
        line = [step, session.rank, batch.tolist(), session.present]
        samples.write(json.dumps([*line, session.is_idle]) + "\n")
        samples.flush()
weights = [float(each.detach().double().sum()) for each in model.parameters()]
report = {"losses": losses, "weights": weights, "present": session.present}
(args.out / f"{session.rank}.json").write_text(json.dumps(report))
