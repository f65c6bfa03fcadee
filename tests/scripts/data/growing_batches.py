"""Batches that grow: two phases train on what the loop has drawn, as many as a variable says."""
# places: backward, vote, done, between

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
seen = session.state.setdefault("seen", [])
size = 2


def score(x):
    with torch.no_grad():
        return model.module(x).norm(dim=1)


def train_step(x, weights):
    optimizer.zero_grad()
    loss = (model(x).square().mean(1) * weights).mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for _ in session.batches(None, until=10):
    size += 1
    x = torch.randn(size + len(seen), 8)
    weights = session.run(score, x).softmax(0)
    seen.append(len(x))
    session.run(train_step, x, weights)
    if session.step_index % 3 == 0:
        size *= 2
write_digests(session, model=model, optimizer=optimizer, seen=seen, size=size)
