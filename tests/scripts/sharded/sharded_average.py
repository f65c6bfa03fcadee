"""HSDP beside a second sharded model that follows it as a moving average."""
# ranks: 4

import torch
from digests import write_digests
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import outlast

session = outlast.init()
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model, average = (nn.Sequential(nn.Linear(9, 24), nn.GELU(), nn.Linear(24, 5)) for _ in range(2))
average.load_state_dict(model.state_dict())
fully_shard(model, mesh=mesh)
fully_shard(average.requires_grad_(False), mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(70 + session.rank)
session.protect(model=model, average=average, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    x = torch.randn(7, 9)
    loss = (model(x) - average(x)).square().mean() + model(x).square().mean()
    loss.backward()
    average.reshard()  # its forward had no backward
    session.report(loss=loss.item())
    optimizer.step()
    with torch.no_grad():
        torch._foreach_lerp_([*average.parameters()], [*model.parameters()], 0.1)


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, average=average, optimizer=optimizer)
