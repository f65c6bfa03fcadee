"""Shards without a replica, in three layouts, and a loop whose code between phases has effects."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import outlast

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--layout", choices=("fsdp", "tensor", "both"), default="fsdp")
parser.add_argument("--steps", type=int, default=9)
parser.add_argument("--scale-after", type=int, default=-1, help="step after which weights change")
parser.add_argument("--rates", action="store_true", help="the loop sets the learning rate itself")
parser.add_argument("--die-at", type=int, help="draw behind which rank 1 kills itself, once")
parser.add_argument("--hold", type=Path, help="before step 5, wait until this file is there")
args = parser.parse_args()

session = outlast.init()
torch.manual_seed(0)
random.seed(session.rank)
model = nn.Sequential(nn.Linear(9, 24), nn.BatchNorm1d(24), nn.GELU(), nn.Linear(24, 5))
shape = (2, 2) if args.layout == "both" else (session.world_size,)
names = {"fsdp": ("shard",), "tensor": ("tensor",), "both": ("shard", "tensor")}[args.layout]
mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
if args.layout != "fsdp":
    model = nn.Sequential(nn.Linear(9, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 5))
    plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
if args.layout != "tensor":
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh["shard"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
noise = torch.Generator().manual_seed(5)
data_rank = mesh.get_local_rank("shard") if args.layout != "tensor" else 0
torch.manual_seed(70 + data_rank)
session.protect(model=model, optimizer=optimizer, scheduler=scheduler, noise=noise)
losses: list[float] = []
rows: list[dict[str, float]] = []
best = 1e9


def train_step(index: int) -> float:
    optimizer.zero_grad()
    samples = torch.randn(7, 9) + 0.01 * torch.randn(7, 9, generator=noise)
    loss = model(samples + 0.001 * index).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()
    return loss.item()


@torch.no_grad()
def evaluate() -> float:
    return model(torch.ones(3, 9)).sum().item()


session.state["draws"] = []
for index in session.batches(None, until=args.steps):
    if args.hold and index == 4:
        args.hold.with_suffix(f".{session.rank}").write_text(str(os.getpid()))
        while not args.hold.exists():
            threading.Event().wait(0.01)
    session.state["draws"].append(random.random())
    if args.rates:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + index)
    if index == args.die_at and session.rank == 1:
        with contextlib.suppress(FileExistsError):
            args.out.with_suffix(".died").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
    loss = session.run(train_step, index)
    losses.append(loss)
    row = {"loss": loss}
    rows.append(row)
    best = min(best, loss)
    scheduler.step()
    session.state["draws"].append(random.random())
    if session.step_index == args.scale_after:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    if index % 3 == 2:
        row["accuracy"] = session.run(evaluate)


def digest_of(tensor: Any) -> str:
    """Digest a tensor, or the shard of a DTensor that this rank holds."""
    shard = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return hashlib.sha256(shard.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


ended = {"random": torch.get_rng_state(), "noise": noise.get_state(), **model.state_dict()}
for name, parameter in model.named_parameters():
    ended |= {f"{name} {key}": value for key, value in optimizer.state[parameter].items()}
found: dict[str, Any] = {name: digest_of(ended[name]) for name in sorted(ended)}
found |= {
    "losses": losses,
    "rows": rows,
    "best": best,
    "lr": scheduler.get_last_lr(),
    **session.state,
}
found["python"] = random.random()
args.out.mkdir(exist_ok=True)
(args.out / f"{session.rank}.json").write_text(json.dumps(found))
