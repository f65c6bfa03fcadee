"""HSDP in bf16: MixedPrecisionPolicy(bf16 parameters, fp32 reduction), two micro-batches a step."""
# ranks: 4

import torch
from digests import write_digests
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import outlast

session = outlast.init()
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
model = nn.Sequential(nn.Linear(9, 24), nn.GELU(), nn.Linear(24, 5))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(70 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        loss = model(torch.randn(7, 9)).square().mean()
        loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
