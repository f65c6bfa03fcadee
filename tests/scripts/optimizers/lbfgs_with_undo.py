"""LBFGS: a closure that is called several times a step, in a phase with an undo copy."""

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    x = torch.randn(5, 8)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        mean = loss.detach().clone()  # LBFGS keeps it and decides by it: equal on all ranks
        dist.all_reduce(mean)
        return mean / session.world_size

    optimizer.step(closure)


for index in session.batches(None, until=10):
    session.run_with_undo(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
