"""A warm-up, then a cosine, stepped in the loop between phases."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [3])
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer, scheduler=scheduler)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
    scheduler.step()
write_digests(session, model=model, optimizer=optimizer, lr=scheduler.get_last_lr())
