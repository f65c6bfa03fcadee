"""State in a SimpleNamespace: a tensor and a list."""
# steps: 12

from types import SimpleNamespace

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
ns = SimpleNamespace(mean=torch.zeros(8), losses=[], lr=1e-2)


def train_step(index):
    optimizer.zero_grad()
    x = torch.randn(5, 8)
    ns.mean = 0.9 * ns.mean + 0.1 * x.mean(0)
    loss = model(x - ns.mean).square().mean()
    loss.backward()
    ns.losses.append(loss.item())
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=12):
    session.run(train_step, index)
    optimizer.param_groups[0]["lr"] = 1e-2 / len(ns.losses)
write_digests(session, model=model, optimizer=optimizer, mean=ns.mean, losses=ns.losses)
