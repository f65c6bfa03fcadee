"""Best so far in globals of the loop: neither in session.state nor protected."""
# places: forward, backward, between

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
best, average = float("inf"), 0.0


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    dist.all_reduce(loss.detach_())
    session.report(loss=loss.item())
    optimizer.step()
    return loss.item()


for index in session.batches(None, until=10):
    loss = session.run(train_step, index)
    best = min(best, loss)
    average = 0.9 * average + 0.1 * loss
write_digests(session, model=model, optimizer=optimizer, best=best, average=average)
