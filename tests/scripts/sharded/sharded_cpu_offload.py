"""HSDP whose shards, gradients and moments stay on the host: CPUOffloadPolicy."""
# ranks: 4

import torch
from digests import write_digests
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import outlast

session = outlast.init()
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
policy = CPUOffloadPolicy(pin_memory=False)
model = nn.Sequential(nn.Linear(9, 24), nn.GELU(), nn.Linear(24, 5))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh, offload_policy=policy)
fully_shard(model, mesh=mesh, offload_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(70 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(7, 9)).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
