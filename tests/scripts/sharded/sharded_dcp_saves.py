"""HSDP that saves by torch.distributed.checkpoint in phases of their own, and reads it back."""
# ranks: 4

import os
from pathlib import Path

import torch
from digests import write_digests
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import outlast

PATH = Path(os.environ["DIGESTS"]) / "saved"


session = outlast.init()
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = nn.Sequential(nn.Linear(9, 24), nn.GELU(), nn.Linear(24, 5))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(70 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(7, 9)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


def save():
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=PATH)
    read = {name: torch.zeros_like(value) for name, value in weights.items()}
    dcp.load({"model": read}, checkpoint_id=PATH)
    session.report(saved=sum(value.to_local().double().sum().item() for value in read.values()))


for index in session.batches(None, until=10):
    session.run(train_step, index)
    if session.step_index % 3 == 0:
        session.run(save)
write_digests(session, model=model, optimizer=optimizer)
