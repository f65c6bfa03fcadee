"""A second task begins late, held back by a Fisher information taken then."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)

model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(50 + session.rank)

session.protect(model=model, optimizer=optimizer)
fisher, anchor = None, None


def take_fisher(x):
    grads = torch.autograd.grad(model.module(x).square().mean(), list(model.parameters()))
    squares = [g.square() for g in grads]
    for each in squares:
        torch.distributed.all_reduce(each)
    return squares


def train_step(x):
    optimizer.zero_grad()
    loss = (model(x) - 1).square().mean()
    if fisher is not None:
        for p, f, a in zip(model.parameters(), fisher, anchor, strict=True):
            loss = loss + (f * (p - a).square()).sum()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()
    return loss.item()


for index in session.batches(None, until=10):
    x = torch.randn(4, 6) + (index > 4)
    if index == 5:
        fisher = session.run(take_fisher, x)
        anchor = [p.detach().clone() for p in model.parameters()]
    session.run(train_step, x)
write_digests(session, model=model, optimizer=optimizer)
