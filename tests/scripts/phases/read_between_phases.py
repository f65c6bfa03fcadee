"""Two phases a batch: the loop reads what the first appended, and hands it to the second."""
# places: backward, vote, apply, done, between

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
norms = []


def score(x):
    with torch.no_grad():
        norms.append(model.module(x).norm().item())


def train_step(x, scale):
    optimizer.zero_grad()
    loss = model(x).square().mean() * scale
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for _ in session.batches(None, until=10):
    x = torch.randn(4, 8)
    session.run(score, x)
    scale = sum(norms) / len(norms)
    session.run(train_step, x, scale)
write_digests(session, model=model, optimizer=optimizer, norms=norms)
