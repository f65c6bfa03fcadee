"""Averages of gradients as attributes of the parameters, applied after a warm-up."""
# steps: 12

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model=model, optimizer=optimizer)
torch.manual_seed(3 + session.rank)
for p in model.parameters():
    p.avg = torch.zeros_like(p)


def train_step(index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    for p in model.parameters():
        p.avg = 0.9 * p.avg + p.grad
        if index >= 5:
            p.grad.add_(p.avg, alpha=0.5)
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=12):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer, avg=[p.avg for p in model.parameters()])
