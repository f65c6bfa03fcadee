"""Weights that a step binarizes through .data, and puts back before the optimizer steps."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    exact = [parameter.data.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.sign() * parameter.data.abs().mean())
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    for parameter, value in zip(model.parameters(), exact, strict=True):
        parameter.data.copy_(value)
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
