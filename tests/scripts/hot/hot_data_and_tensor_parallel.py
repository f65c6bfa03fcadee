"""Hot spares for a 2x2 mesh of data and tensor parallel layers, sampled by the data dimension"""
# ranks: 4

import torch
from digests import write_digests
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast

session = outlast.init(hot_spares=True)
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tensor"))
model = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 4))
parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["replicate", "shard"])
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
data = TensorDataset(torch.randn(320, 8), torch.randn(320, 4))
sampler = DistributedSampler(data, 2, mesh["replicate"].get_local_rank())
loader = DataLoader(data, 8, sampler=sampler)
session.protect(model=model, optimizer=optimizer, loader=loader)


def train_step(batch):
    inputs, target = batch
    optimizer.zero_grad()
    loss = (model(inputs) - target).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for batch in session.batches(loader, until=10):
    session.run(train_step, batch)
write_digests(session, model=model, optimizer=optimizer)
