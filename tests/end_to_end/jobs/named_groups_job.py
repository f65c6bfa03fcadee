"""Script that asks for gloo by name, as frameworks do: a group, and a dimension of a mesh."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import outlast

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()
args.out.mkdir(exist_ok=True)

session = outlast.init()
if not dist.is_initialized():
    dist.init_process_group("gloo")
everyone = dist.new_group(backend="gloo")
mesh = init_device_mesh(
    "cpu", (2, 2), mesh_dim_names=("rows", "columns"), backend_override={"columns": "gloo"}
)
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1), process_group=everyone)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
losses = session.state.setdefault("losses", [])
session.protect(model=model, optimizer=optimizer)
torch.manual_seed(session.rank)


def train_step(_: int) -> None:
    optimizer.zero_grad()
    loss = model(torch.randn(3, 4)).square().mean()
    loss.backward()
    shared = loss.detach().clone()
    dist.all_reduce(shared, group=mesh["columns"].get_group())
    losses.append(shared.item())
    optimizer.step()


for index in session.batches(None, until=8):
    session.run(train_step, index)
names = [dist.get_backend(everyone), dist.get_backend(mesh["columns"].get_group())]
result = {"losses": losses, "weight": model.module.weight.tolist(), "names": names}
(args.out / f"{session.rank}.json").write_text(json.dumps(result))
