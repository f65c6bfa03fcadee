"""Tensor parallel: parallelize_module splits two layers by column and by row over all ranks."""
# ranks: 2

import torch
from digests import write_digests
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import outlast

session = outlast.init()
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (session.world_size,))
model = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 6), nn.LayerNorm(6))
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
model = parallelize_module(model, mesh, plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
torch.manual_seed(7)  # ranks of one model read the same samples
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(7, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
