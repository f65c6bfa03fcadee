"""LocalSGD that averages through .data every third step: seen when it writes, not before."""
# refused: before the vote

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn

import outlast

session = outlast.init()
torch.manual_seed(0)
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model=model, optimizer=optimizer)


def train_step(index):
    optimizer.zero_grad()
    model(torch.randn(5, 8)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if index % 3 == 2:
            parameter.data.mul_(0.5)
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
