"""HSDP on a 2x2 mesh with hot spares, by a script that keeps no rank unless it is told to."""

from __future__ import annotations

import argparse
import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast

STEPS, HOLD_AT = 12, 5

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--hold", type=Path, help="wait for this file behind step 5")
parser.add_argument("--second-hold", type=Path, help="wait for this file behind step 8")
parser.add_argument("--keep", default="", help="what the script keeps of its place")
parser.add_argument("--width", type=int, default=24, help="an odd one has uneven shards")
parser.add_argument("--compiled", action="store_true")
parser.add_argument("--one-dimensional", action="store_true", help="no shard has a replica")
args = parser.parse_args()

session = outlast.init(hot_spares=True)
torch.manual_seed(1)
shape, names = ((4,), ("shard",)) if args.one_dimensional else ((2, 2), ("replicate", "shard"))
mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
shards = mesh["shard"]
scale = 1.0
if args.keep == "local rank":
    scale += mesh["replicate"].get_local_rank()
if args.keep == "coordinate":
    from coordinate_of_mesh import first_coordinate

    scale += first_coordinate(mesh)
if args.keep == "row":
    scale += float(shards.mesh.sum())
if args.keep == "own group":
    own = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][dist.get_rank() // 2]
    assert isinstance(own, dist.ProcessGroup)
    scale += dist.get_rank(own)
blocks = [nn.Sequential(nn.Linear(args.width, args.width), nn.GELU()) for _ in range(2)]
model = nn.Sequential(nn.Linear(9, args.width), *blocks, nn.Dropout(0.1), nn.Linear(args.width, 5))
if args.compiled:
    for block in blocks:
        block.compile(backend="aot_eager")
for part in (*blocks, model):
    fully_shard(part, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
dice = torch.Generator().manual_seed(3)
data = TensorDataset(torch.randn(256, 9, generator=dice), torch.randn(256, 5, generator=dice))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
session.protect(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)


def train_step(batch: list[torch.Tensor]) -> float:
    x, y = batch
    optimizer.zero_grad()
    loss = (scale * (model(x) - y) ** 2).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    return loss.item()


def hold(file: Path | None) -> None:
    if file:
        file.with_suffix(f".{session.rank}").touch()
        while not file.exists():
            threading.Event().wait(0.01)


losses = []
for batch in session.batches(loader, until=STEPS):
    losses.append(session.run(train_step, batch))
    if session.step_index == HOLD_AT:
        hold(args.hold)
    if session.step_index == HOLD_AT + 3:
        hold(args.second_hold)


def add(digest: Any, tensor: Any) -> None:
    shard = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    digest.update(shard.detach().contiguous().numpy().tobytes())


found = hashlib.sha256(repr((losses, scheduler.get_last_lr())).encode())
for value in (*model.state_dict().values(), torch.get_rng_state()):
    add(found, value)
for parameter in model.parameters():
    for _, value in sorted(optimizer.state[parameter].items()):  # a rebuild keeps no order of keys
        add(found, value)
from coordinate_of_mesh import place_of  # noqa: E402 - a name in it would bind hot spares

ended = {"digest": found.hexdigest(), "place": place_of(mesh), "kept": place_of(shards)}
args.out.mkdir(exist_ok=True)
(args.out / f"{session.rank}.json").write_text(json.dumps(ended))
