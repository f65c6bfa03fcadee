"""Accumulation over batches with an undo copy: only every third phase steps, gradients stay."""
# refused: steps with a gradient of

import torch
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
    loss = model(torch.randn(5, 8)).square().mean() / 3
    loss.backward()
    if index % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()


for index in session.batches(None, until=10):
    session.run_with_undo(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
