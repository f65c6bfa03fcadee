"""A name that is made once for the job, and environment variables that libraries read."""

import os

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
name = session.shared("name", lambda: f"run-of-{session.world_size}")
assert os.environ["RANK"] == str(session.rank) == str(dist.get_rank())
torch.manual_seed(len(name))
model = DistributedDataParallel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer, name=name)
