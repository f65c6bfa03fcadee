"""A helper object draws a projection late, in a cached_property."""

import functools

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)


class Projector:
    def __init__(self, width):
        self.width = width

    @functools.cached_property
    def matrix(self):
        return torch.randn(self.width, 6)


projector = Projector(6)
model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
torch.manual_seed(50 + session.rank)

session.protect(model=model, optimizer=optimizer)


def train_step(index):
    optimizer.zero_grad()
    x = torch.randn(4, 6)
    if index >= 4:
        x = x @ projector.matrix
    loss = model(x).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()
    return loss.item()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
