"""EMA with buffers: AveragedModel(use_buffers=True) of a network with BatchNorm."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import outlast

session = outlast.init()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
model = DistributedDataParallel(net)
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(10 + session.rank)
session.protect(model=model, ema=ema, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(6, 8) + session.rank).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()
    ema.update_parameters(net)


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, ema=ema, optimizer=optimizer)
