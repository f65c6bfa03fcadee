"""A group of parameters that the step itself gives to the optimizer, before it steps."""
# refused: group 1 was added, with

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
body, head = nn.Linear(8, 8), nn.Linear(8, 4)
model = DistributedDataParallel(nn.Sequential(body, head))
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
session.protect(model=model, optimizer=optimizer)


def train_step(index):
    if index == 0:
        optimizer.add_param_group({"params": body.parameters(), "lr": 0.01})
    optimizer.zero_grad()
    model(torch.randn(5, 8)).square().mean().backward()
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
