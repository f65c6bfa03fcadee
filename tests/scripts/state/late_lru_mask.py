"""Masks by length, drawn once each in an lru_cache; new lengths come late."""
# refused: the cache mask_of

import functools

import torch
from digests import write_digests
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)

model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
torch.manual_seed(50 + session.rank)

session.protect(model=model, optimizer=optimizer)


@functools.lru_cache
def mask_of(width):
    return torch.rand(width, 6) < 0.7


def train_step(index):
    optimizer.zero_grad()
    width = 3 + index // 3
    x = functional.dropout(torch.randn(width, 6), 0.1)
    loss = model(x * mask_of(width) if index > 2 else x).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()
    return loss.item()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
