"""HSDP with a moving average in a dict of DTensors that the step changes."""
# ranks: 4
# refused: changes average

import torch
from digests import write_digests
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import outlast

session = outlast.init()
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = nn.Sequential(nn.Linear(9, 24), nn.GELU(), nn.Linear(24, 5))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
average = {name: p.detach().clone() for name, p in model.named_parameters()}
torch.manual_seed(70 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(7, 9)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()
    with torch.no_grad():
        for name, p in model.named_parameters():
            average[name].lerp_(p, 0.1)


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer, average=average)
