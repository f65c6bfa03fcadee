"""A job of two ranks on one kind of device, whose ranks write digests of all that they end with."""

from __future__ import annotations

import argparse
import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import outlast

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--stuck-at", type=int, help="step in which rank 1 hangs on its device, once")
args = parser.parse_args()

session = outlast.init()
torch.use_deterministic_algorithms(True)
device = torch.device(args.device)
if args.device == "cuda":
    device = torch.device("cuda", session.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
torch.manual_seed(0)
model: Any = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 8))
model.to(device)
if args.parallel == "ddp":
    model = DistributedDataParallel(model)
else:
    for layer in (model[0], model[3], model):
        fully_shard(layer)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(7 + session.rank)
session.protect(model=model, optimizer=optimizer)


def hang_once() -> None:
    try:
        args.out.with_suffix(".stuck").touch(exist_ok=False)
    except FileExistsError:
        return
    if args.device == "cpu":
        threading.Event().wait()
    torch.cuda._sleep(1 << 50)
    torch.cuda.synchronize()


def train_step(index: int) -> None:
    optimizer.zero_grad()
    samples = torch.randn(16, 64, device=device) + 0.001 * index
    loss = model(samples).square().mean()
    if index == args.stuck_at and session.rank == 1:
        hang_once()
    loss.backward()
    optimizer.step()


for index in session.batches(None, until=args.steps):
    session.run(train_step, index)


def digest_of(tensor: Any) -> str:
    """Digest a tensor, or the shard of a DTensor that this rank holds."""
    shard = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return hashlib.sha256(shard.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


found: dict[str, Any] = {name: digest_of(each) for name, each in model.state_dict().items()}
for name, parameter in model.named_parameters():
    for key, value in optimizer.state[parameter].items():
        found[f"{name} {key}"] = digest_of(value)
found["random"] = torch.rand(1, device=device).item()
args.out.mkdir(exist_ok=True)
(args.out / f"{session.rank}.json").write_text(json.dumps(found))
