"""A job whose state beside the weights is equal on all ranks until step DIFFERS, and not after.

Each rank writes its state to `rank-N.txt` in the folder of the second argument.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
differs, folder = int(sys.argv[1]), Path(sys.argv[2])
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=100)
metric = nn.Module()
total = torch.zeros(())
metric.register_buffer("total", total)
session.protect(model=model, optimizer=optimizer, scheduler=scheduler, metric=metric)


def train_step(index):
    optimizer.zero_grad()
    model(torch.full((2, 4), 0.1 * index)).square().mean().backward()
    optimizer.step()
    own = session.rank + 1 if index == differs else 0
    total.add_(1 + own)
    scheduler.step(10 - index - own)


for index in session.batches(None, until=8):
    session.run(train_step, index)
state = [total.item(), scheduler.best, scheduler.num_bad_epochs]
state += [each.sum().item() for each in model.parameters()]
(folder / f"rank-{session.rank}.txt").write_text(repr(state))
