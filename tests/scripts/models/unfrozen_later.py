"""Layers that are unfrozen in the middle: their group is the optimizer's from the start."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
trunk, head = nn.Sequential(nn.Linear(8, 16), nn.GELU()), nn.Linear(16, 4)
model = DistributedDataParallel(nn.Sequential(trunk, head), find_unused_parameters=True)
groups = [{"params": head.parameters()}, {"params": trunk.parameters(), "lr": 1e-3}]
optimizer = torch.optim.AdamW(groups, lr=1e-2)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)
trunk.requires_grad_(False)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    if session.step_index == 5:
        trunk.requires_grad_(True)
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
