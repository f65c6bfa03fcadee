"""HSDP with a fused AdamW and a foreach SGD on DTensors, a scheduler each."""
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
fused = torch.optim.AdamW(model[0].parameters(), lr=1e-2, fused=True, amsgrad=True)
foreach = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9, foreach=True)
decays = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (fused, foreach)]
torch.manual_seed(70 + session.rank)
session.protect(model=model, fused=fused, foreach=foreach, first=decays[0], second=decays[1])


def train_step(_index):
    fused.zero_grad()
    foreach.zero_grad()
    loss = model(torch.randn(7, 9)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    fused.step()
    foreach.step()
    for decay in decays:
        decay.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, fused=fused, foreach=foreach)
