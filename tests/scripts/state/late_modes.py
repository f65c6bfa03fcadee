"""Denormals are flushed, and a variable of the environment is set, late in the loop."""

import os

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)

model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
torch.manual_seed(50 + session.rank)

session.protect(model=model, optimizer=optimizer)


def train_step(index):
    optimizer.zero_grad()
    scale = float(os.environ.get("SCALE_OF_LOSS", "1"))
    tiny = torch.full((1,), 1e-38) * 1e-2
    loss = model(torch.randn(4, 6)).square().mean() * scale * (1.5 if tiny.item() != 0 else 1.0)
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()
    return loss.item()


for index in session.batches(None, until=10):
    if index == 3:
        torch.set_flush_denormal(True)
        os.environ["SCALE_OF_LOSS"] = "0.5"
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
