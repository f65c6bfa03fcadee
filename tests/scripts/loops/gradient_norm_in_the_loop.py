"""The norm of the step's gradients is taken in the loop, between phases."""
# refused: between phases the loop reads .grad

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)
norms = session.state.setdefault("norms", [])


def train_step(_index):
    optimizer.zero_grad()
    model(torch.randn(5, 8)).square().mean().backward()
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
    norms.append(sum(p.grad.square().sum().item() for p in model.parameters()) ** 0.5)
write_digests(session, model=model, optimizer=optimizer, norms=norms)
