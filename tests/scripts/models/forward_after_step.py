"""A forward in training mode behind the step: it changes BatchNorm's statistics after the vote."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
model = DistributedDataParallel(net, broadcast_buffers=False)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(10 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    batch = torch.randn(6, 8) + session.rank
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        after = net(batch).square().mean()
    session.report(loss=loss.item(), after=after.item())


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
