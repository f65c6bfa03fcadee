"""A history of losses on each rank, appended inside the step, drawn at the end."""

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
losses, norms = [], {"by_step": {}}
session.protect(model=model, optimizer=optimizer, losses=losses, norms=norms)


def train_step(index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    losses.append(loss.item())
    norms["by_step"][index] = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer, losses=losses, norms=norms)
