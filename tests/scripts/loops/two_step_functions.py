"""A warm-up function for the first steps, then another one that also clips."""

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


def warm_up(_index):
    optimizer.zero_grad()
    loss = 0.1 * model(torch.randn(5, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(7, 8)).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(warm_up if session.step_index < 4 else train_step, index)
write_digests(session, model=model, optimizer=optimizer)
