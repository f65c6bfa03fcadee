"""A fused AdamW with AMSGrad, and parameter groups whose rates the loop changes."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
decayed, plain = (
    [p for p in model.parameters() if p.dim() > 1],
    [p for p in model.parameters() if p.dim() < 2],
)
groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True, amsgrad=True)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
    for group in optimizer.param_groups:
        group["lr"] *= 0.9
write_digests(session, model=model, optimizer=optimizer)
