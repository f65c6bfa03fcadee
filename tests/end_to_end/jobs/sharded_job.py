"""HSDP on a 2x2 mesh, with ranks that die in the middle of FSDP2's own collectives."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

import outlast

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--die", nargs="*", default=[], help="COLLECTIVE:RANK:INDEX, dies there once")
parser.add_argument("--one-dimensional", action="store_true", help="no shard has a replica")
parser.add_argument("--clamp", type=int, default=-1, help="rank whose shard the loop clamps")
args = parser.parse_args()

session = outlast.init()
here = {"index": -1}


def die_once(collective: str, work: dist.Work | None) -> dist.Work | None:
    """Die while the bytes of `work` are on their way; else wait for it."""
    place = f"{collective}:{session.rank}:{here['index']}"
    mark = args.out.with_name(f"died-{place}")
    if place in args.die and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if work is not None:
        work.wait()
    return None


class Gather(DefaultAllGather):
    """An all-gather in which a rank dies."""

    def __call__(self, *tensors: Any, async_op: bool = False, **more: Any) -> dist.Work | None:
        del async_op
        return die_once("gather", super().__call__(*tensors, async_op=True, **more))


class Scatter(DefaultReduceScatter):
    """A reduce-scatter in which a rank dies."""

    def __call__(self, *tensors: Any, async_op: bool = False, **more: Any) -> Any:
        del async_op
        return die_once("scatter", super().__call__(*tensors, async_op=True, **more))


torch.manual_seed(0)
shape, names = ((4,), ("shard",)) if args.one_dimensional else ((2, 2), ("replicate", "shard"))
mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
model = nn.Sequential(nn.Linear(9, 24), nn.GELU(), nn.Linear(24, 5))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
for part in (model[0], model[2]):
    assert isinstance(part, FSDPModule)
    part.set_custom_all_gather(Gather())
    part.set_custom_reduce_scatter(Scatter())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(70 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(index: int) -> None:
    here["index"] = index
    optimizer.zero_grad()
    loss = model(torch.randn(7, 9)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=12):
    if session.rank == args.clamp:  # as clipping does whose limit one shard alone exceeds
        for parameter in model.parameters():
            parameter.to_local().data.clamp_(-0.02, 0.02)
    session.run(train_step, index)


def digest_of(tensor: Any) -> str:
    """Digest a tensor, or the shard of a DTensor that this rank holds."""
    shard = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return hashlib.sha256(shard.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


ended = {"random": torch.get_rng_state(), **model.state_dict()}
for name, parameter in model.named_parameters():
    ended |= {f"{name} {key}": value for key, value in optimizer.state[parameter].items()}
args.out.mkdir(exist_ok=True)
digests = {name: digest_of(ended[name]) for name in sorted(ended)}
(args.out / f"{session.rank}.json").write_text(json.dumps(digests))
