"""Batches from a generator that the step's closure advances."""
# refused: changes batches

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


def make_step():
    batches = (torch.full((5, 8), float(number)) for number in range(1, 100))

    def train_step(_index):
        optimizer.zero_grad()
        loss = model(next(batches)).square().mean()
        loss.backward()
        session.report(loss=loss.item())
        optimizer.step()

    return train_step


step = make_step()
for index in session.batches(None, until=10):
    session.run(step, index)
write_digests(session, model=model, optimizer=optimizer)
