"""Losses that steps returned, in a queue that later steps train on."""
# ranks: 3
# places: apply, backward, vote

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(4)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 2)))
optimizer = torch.optim.Adamax(model.parameters(), lr=0.02)
torch.manual_seed(10 + session.rank)
session.protect(model=model, optimizer=optimizer)
queue = torch.ones(2, 2)


def train_step(_index, queue):
    optimizer.zero_grad()
    outputs = model(torch.randn(5, 6))
    loss = (outputs @ queue.T - 1).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()
    return loss.item()


for index in session.batches(None, until=10):
    loss = session.run(train_step, index, queue)
    queue = torch.cat([queue, torch.full((1, 2), loss)])[-3:]
write_digests(session, model=model, optimizer=optimizer, queue=queue)
