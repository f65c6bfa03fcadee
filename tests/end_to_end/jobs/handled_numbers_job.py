"""Job whose script handles numbers that are not finite itself, in one of several ways."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import outlast

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--way", required=True)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--bad", default="", help="indices of samples with a NaN, as 3,17")
parser.add_argument("--scale", type=float, default=3.3e38)
parser.add_argument("--spot", type=int, default=-1, help="NaN in one late gradient of rank 1, once")
args = parser.parse_args()
BAD = {int(one) for one in args.bad.split(",") if one}


class Samples(Dataset):
    """Rows of numbers; some have a NaN."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        row = torch.full((8,), index / 128.0)
        if index in BAD:
            row[3] = math.nan
        return index, row


session = outlast.init()
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))
layers = nn.Sequential(layers, nn.BatchNorm1d(4), nn.Linear(4, 4))
if "sharded" in args.way:
    model: nn.Module = fully_shard(layers)
else:
    bucket_view = "view" in args.way
    model = nn.parallel.DistributedDataParallel(layers, gradient_as_bucket_view=bucket_view)
torch.manual_seed(100 + session.rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused="fused" in args.way)
scaler = torch.amp.GradScaler("cpu", enabled="scaler" in args.way, init_scale=args.scale)
data = Samples()
loader = DataLoader(
    data, batch_size=4, sampler=DistributedSampler(data, shuffle=False), drop_last=True
)
losses: list[float] = []
counts = {"left out": 0}
session.protect(
    model=model, optimizer=optimizer, scaler=scaler, loader=loader, losses=losses, counts=counts
)


handles: list[torch.utils.hooks.RemovableHandle] = []


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spoil_once() -> None:
    """Let the device of rank 1 make a NaN in one late gradient, once."""
    marker = args.out.with_suffix(f".{session.rank}")
    if args.spot == session.step_index and session.rank == 1 and not marker.exists():
        marker.touch()
        handles.append(layers[2].bias.register_hook(spoiled))


def spoiled(gradient: torch.Tensor) -> torch.Tensor:
    handles.pop().remove()
    return gradient * math.nan


def forward(batch: list[torch.Tensor]) -> torch.Tensor:
    index, x = batch
    spoil_once()
    optimizer.zero_grad()
    return nn.functional.cross_entropy(model(x), index % 4)


def scaled_step(batch: list[torch.Tensor]) -> float:
    loss = forward(batch)
    scaler.scale(loss).backward()
    if "clip" in args.way:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def cleaning_step(batch: list[torch.Tensor]) -> float:
    loss = forward(batch)
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = torch.where(parameter.grad.isfinite(), parameter.grad, 0.0)
    optimizer.step()
    return loss.item()


def clipping_step(batch: list[torch.Tensor]) -> float:
    loss = forward(batch)
    loss.backward()
    for parameter in model.parameters():
        parameter.grad.nan_to_num_()
    optimizer.step()
    return loss.item()


def skipping_step(batch: list[torch.Tensor]) -> float:
    loss = forward(batch)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if norm < 1e6:
        optimizer.step()
    else:
        counts["left out"] += 1
    optimizer.zero_grad()
    return loss.item()


def masking_step(batch: list[torch.Tensor]) -> float:
    loss = forward(batch)
    if not math.isfinite(loss.item()):
        loss = sum(parameter.sum() for parameter in layers.parameters()) * 0.0
        model.require_backward_grad_sync = True
    loss.backward()
    optimizer.step()
    return loss.item()


def sometimes_step(batch: list[torch.Tensor]) -> float:
    """Leave out every third step, for no reason of the numbers."""
    loss = forward(batch)
    if session.step_index % 3 == 0:
        return loss.item()
    loss.backward()
    optimizer.step()
    return loss.item()


steps = {
    "scaler": scaled_step, "where": cleaning_step, "view": clipping_step, "skip": skipping_step,
    "mask": masking_step, "sometimes": sometimes_step,
}  # fmt: skip
step = next(function for name, function in steps.items() if name in args.way)
for batch in session.batches(loader, until=args.steps):
    loss = session.run(step, batch)
    losses.append(loss)

weights, digest = hashlib.sha256(), hashlib.sha256(torch.get_rng_state().numpy().tobytes())
for tensor in model.state_dict().values():
    weights.update(local(tensor).numpy().tobytes())
for state in optimizer.state.values():
    digest.update(local(state["exp_avg_sq"]).numpy().tobytes())
result = {"digest": digest.hexdigest(), "weights": weights.hexdigest(), **counts}
result |= {"losses": [repr(one) for one in losses], "scale": scaler.get_scale()}
args.out.mkdir(exist_ok=True)
(args.out / f"{session.rank}.json").write_text(json.dumps(result))
