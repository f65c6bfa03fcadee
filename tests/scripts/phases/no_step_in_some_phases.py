"""Phases that decide not to step: the loss is not finite on some rank, all skip."""

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(index):
    optimizer.zero_grad()
    scale = float("nan") if index == 3 and session.rank == 1 else 1.0
    loss = model(torch.randn(5, 8)).square().mean() * scale
    finite = torch.isfinite(loss.detach()).float()
    dist.all_reduce(finite, dist.ReduceOp.MIN)
    if not finite:
        return
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
