"""ReduceLROnPlateau by epoch, between phases, on each rank's own validation loss."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer, scheduler=scheduler)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
    optimizer.step()


def validate():
    with torch.no_grad():
        return model(torch.randn(5, 8) * (1 + session.rank)).square().mean().item()


for index in session.batches(None, until=10):
    session.run(train_step, index)
    if index % 2 == 1:
        scheduler.step(session.run(validate))
write_digests(session, model=model, optimizer=optimizer, scheduler=scheduler.state_dict())
