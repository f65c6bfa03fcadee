"""Frozen parameters: a pretrained trunk stays, a head learns."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
trunk = nn.Sequential(nn.Linear(8, 16), nn.GELU())
for parameter in trunk.parameters():
    parameter.requires_grad = False
model = DistributedDataParallel(nn.Sequential(trunk, nn.Linear(16, 4)))
optimizer = torch.optim.AdamW(model.module[1].parameters(), lr=1e-2)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
