"""Epochs that the loop leaves early, each with a loader of its own, with loader processes."""
# steps: 11

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.2), nn.Linear(12, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
data = TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(x, y):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()


@torch.no_grad()
def evaluate():
    weights = torch.stack([p.norm() for p in model.parameters()]).sum()
    dist.all_reduce(weights)
    return weights.item()


seen = []
for epoch in session.epochs(3):
    size = 4 + 2 * epoch
    loader = DataLoader(data, size, sampler=DistributedSampler(data), num_workers=2)
    for index, (x, y) in session.enumerate(loader):
        if index == 4 or (epoch == 2 and index == 3):
            break
        session.run(train_step, x, y)
        seen.append((x.mean().item(), torch.rand(1).item()))
    if epoch != 1:
        seen.append(session.run(evaluate))
write_digests(session, model=model, optimizer=optimizer, seen=seen)
