"""A GradScaler that is switched off, as in fp32 runs of a script for mixed precision."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", enabled=False)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer, scaler=scaler)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    scaler.scale(loss).backward()
    session.report(loss=loss.item())
    scaler.step(optimizer)
    scaler.update()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
