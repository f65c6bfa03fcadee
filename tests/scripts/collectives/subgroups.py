"""Subgroups: pairs of ranks from new_group average their statistics, all ranks train."""
# ranks: 3

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
torch.manual_seed(3 + session.rank)
history = session.state.setdefault("history", [])
session.protect(model=model, optimizer=optimizer)


def train_step(index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    for first, pair in enumerate(pairs):
        if session.rank in (first, first + 1):
            shared = loss.detach().clone()
            dist.all_reduce(shared, group=pair)
            history.append(shared.item())
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, history=history)
