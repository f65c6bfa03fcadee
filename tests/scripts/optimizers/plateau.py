"""ReduceLROnPlateau on the reduced loss, the same on all ranks."""

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer, scheduler=scheduler)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    session.report(loss=total.item(), lr=optimizer.param_groups[0]["lr"])
    optimizer.step()
    scheduler.step(total.item())


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
