"""HSDP accumulation whose step switches gradient synchronization on before, and off behind it."""
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
model = nn.Sequential(nn.Linear(9, 24), nn.GELU(), nn.Linear(24, 5))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
model.set_requires_gradient_sync(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(70 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    for part in range(3):
        if part == 2:
            model.set_requires_gradient_sync(True)
        loss = model(torch.randn(7, 9)).square().mean()
        loss.backward()
    session.report(loss=loss.item())
    optimizer.step()
    model.set_requires_gradient_sync(False)


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
