"""An end of the loop that compares the mean loss which steps returned with the best one."""
# places: apply, backward, vote

import torch
from digests import write_digests
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(4)
model = DistributedDataParallel(nn.Linear(6, 2))
optimizer = torch.optim.Rprop(model.parameters(), lr=0.05)
inputs, labels = torch.randn(16, 6), torch.randn(16, 2)
session.protect(model=model, optimizer=optimizer)
best, losses, worse = float("inf"), [], 0


def train_step(_index):
    optimizer.zero_grad()
    loss = (model(inputs) - labels).square().mean()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    loss.backward()
    session.report(loss=mean.item())
    optimizer.step()
    return mean


for index in session.batches(None, until=10):
    mean = session.run(train_step, index)
    losses.append(mean.item())
    if mean < best:
        best = mean.item()
    else:
        worse += 1
    if worse == 3:
        break
write_digests(session, model=model, optimizer=optimizer, losses=losses, best=best)
