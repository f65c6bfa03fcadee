"""Tensor parallel inside DistributedDataParallel(device_mesh=...)."""
# ranks: 4
# refused: makes new parameters in each forward

import torch
from digests import write_digests
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
model = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 6))
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
model = parallelize_module(model, mesh["tensor"], plan)
model = DistributedDataParallel(model, device_mesh=mesh["data"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(7 + mesh["data"].get_local_rank())
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
