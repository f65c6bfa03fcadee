"""Training job whose ranks need each other in replicas, which logs the samples that it trains.

A rank's loss is that of its own samples (hsdp), or of those of its replica (tensor).
"""

from __future__ import annotations

import argparse
import json
import os
import threading
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import outlast

SAMPLES = 96


class Samples(Dataset):
    """Items with their index, equal on all ranks."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.sin(torch.arange(6) * (index + 1.0))


def make_model() -> nn.Sequential:
    """Return the model as all ranks build it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the loss of a batch."""
    index, x = batch
    return nn.functional.cross_entropy(model(x), index % 4)


def arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds a step")
    parser.add_argument("--kind", default="hsdp", help="hsdp, tensor, or what needs all ranks")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--gate", type=Path, help="made at step 2: workers wait while it is there")
    parser.add_argument("--clip", type=float, default=0.0)
    args = parser.parse_args()
    args.out = args.out or args.folder
    args.out.mkdir(exist_ok=True)
    return args


def main() -> None:
    """Train."""
    args = arguments()
    while args.gate and args.gate.exists():
        threading.Event().wait(0.02)
    session = outlast.init()
    size = session.world_size // args.replicas
    mesh = init_device_mesh("cpu", (args.replicas, size), mesh_dim_names=("replicate", "shard"))
    model = make_model()
    if args.kind == "tensor":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(model, mesh["shard"], plan)
    else:
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data, place = Samples(), session.rank
    sampler = DistributedSampler(data, seed=1)
    if args.kind == "tensor":
        place = session.rank // size
        sampler = DistributedSampler(data, args.replicas, place, seed=1)
    loader = DataLoader(data, batch_size=2, sampler=sampler, drop_last=True)
    session.protect(model=model, optimizer=optimizer, loader=loader)

    def train_step(batch: list[torch.Tensor]) -> float:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if args.kind == "tensor":  # data parallelism by hand: DDP knows no sharded parameters
            for parameter in model.parameters():
                grad: Any = parameter.grad
                part = grad.to_local() if isinstance(grad, DTensor) else grad
                dist.all_reduce(part, group=mesh.get_group("replicate"))
                part /= args.replicas
        if args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if args.kind == "counts":
            dist.all_reduce(torch.ones((), dtype=torch.int64))
        if args.kind == "root":
            dist.broadcast(mean.clone(), 2)
        optimizer.step()
        return float(mean) / session.world_size

    losses: list[float] = []
    with (args.out / f"{session.rank}.{os.getpid()}.jsonl").open("a") as samples:
        for batch in session.batches(loader, epochs=args.epochs):
            threading.Event().wait(args.pace)
            step = session.step_index
            if args.gate and step == 2:
                args.gate.touch()
            losses.append(session.run(train_step, batch))
            line = [step, session.rank, batch[0].tolist(), session.present]
            samples.write(json.dumps([*line, session.is_idle, losses[-1]]) + "\n")
            samples.flush()

    def gather() -> list[float]:
        parts = (each.full_tensor() if isinstance(each, DTensor) else each for each in
                 model.parameters())  # fmt: skip
        return [float(each.detach().double().abs().sum()) for each in parts]

    report = {"losses": losses, "weights": session.run(gather), "present": session.present}
    (args.out / f"{session.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
