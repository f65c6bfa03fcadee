"""Module surgery: the loop replaces an activation."""
# refused: was replaced by a ReLU

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


def train_step(index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()
    return loss.item()


for index in session.batches(None, until=12):
    session.run(train_step, index)
    if session.step_index == 2:
        model.module[1] = nn.ReLU()
write_digests(session, model=model, optimizer=optimizer)
