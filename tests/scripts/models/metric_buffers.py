"""A metric whose sums are buffers of a module: each rank adds its own numbers behind the step."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast


class Mean(nn.Module):
    """A running mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def update(self, value):
        self.total += value
        self.count += 1


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
metric = Mean()
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer, metric=metric)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item(), mean=(metric.total / metric.count.clamp(min=1)).item())
    optimizer.step()
    metric.update(loss.detach())


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer, metric=metric)
