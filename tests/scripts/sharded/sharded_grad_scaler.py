"""HSDP in fp16 with a GradScaler over DTensors, which skips a step with infinities."""
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
policy = MixedPrecisionPolicy(torch.float16, torch.float32, torch.float32)
model = nn.Sequential(nn.Linear(9, 24), nn.GELU(), nn.Linear(24, 5))
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
torch.manual_seed(70 + session.rank)
session.protect(model=model, optimizer=optimizer, scaler=scaler)


def train_step(index):
    optimizer.zero_grad()
    loss = model(torch.randn(7, 9)).square().mean()
    if index == 4 and session.rank == 1:
        loss = loss * float("inf")  # one rank alone overflows
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    session.report(scale=scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer, scaler=scaler.state_dict())
