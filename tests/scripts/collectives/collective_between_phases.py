"""A barrier in the loop, outside of session.run."""
# refused: outside a phase

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
    dist.barrier()
write_digests(session, model=model, optimizer=optimizer)
