"""Job whose code and phases behind the loop count. `--die` kills a rank in the evaluation there."""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--epochs", action="store_true")
parser.add_argument("--die", type=int, default=-1, help="rank")
args = parser.parse_args()

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer, scheduler=scheduler)


def train_step(_index):
    optimizer.zero_grad()
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()


@torch.no_grad()
def evaluate(*, is_last):
    if is_last and session.rank == args.die:
        marker = args.out.with_name("died")
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    weights = torch.stack([p.norm() for p in model.parameters()]).sum()
    dist.all_reduce(weights)
    return weights.item()


values, count = [], 0
if args.epochs:
    for _ in session.epochs(2):
        for index in session.batches([0, 1]):
            session.run(train_step, index)
            count += 1
        values.append(session.run(evaluate, is_last=False))
else:
    for index in session.batches(None, until=4):
        session.run(train_step, index)
        count += 1
        values.append(index)
scheduler.step()
values.append(torch.rand(1).item())
count += 10
values.append(session.run(evaluate, is_last=True))
scheduler.step()
values.append((count, torch.rand(1).item(), scheduler.get_last_lr()))
args.out.mkdir(exist_ok=True)
(args.out / f"{session.rank}.json").write_text(json.dumps(values))
