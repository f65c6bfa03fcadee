"""A run of steps of 20 ms, with a loader process: `steady_job OUT STEPS [KIND] [HOLD] [PACE]`.

KIND is a key of `KINDS`. The loop stands 10 steps before its end until the file HOLD is gone. A
step takes PACE seconds until then, by default ever longer on the last 60 steps: a rank that stands
is in its script, where nobody can ask it to connect anew.
The model is not built while a file `gate` is beside HOLD.
OUT/RANK.json has the number of steps, a digest of the weights, and the results in hexadecimal.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast

WIDE = 1 << 16  # elements, so that a transfer and a save take a while


def data_parallel(model: nn.Module) -> nn.Module:
    """Replicate on all ranks."""
    return DistributedDataParallel(model)


def hybrid_shard(model: nn.Module) -> nn.Module:
    """Shard on the two ranks of a host, replicate across hosts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    return model


def full_shard(model: nn.Module) -> nn.Module:
    """Shard on all ranks: no rank has a replica."""
    fully_shard(model)
    return model


KINDS = {"ddp": data_parallel, "hsdp": hybrid_shard, "fsdp": full_shard}

out, steps = Path(sys.argv[1]), int(sys.argv[2])
kind = sys.argv[3] if len(sys.argv) > 3 else "ddp"
hold = Path(sys.argv[4]) if len(sys.argv) > 4 else None
pace_s = float(sys.argv[5]) if len(sys.argv) > 5 else None
session = outlast.init()
while hold and hold.with_name("gate").exists():
    threading.Event().wait(0.02)
torch.manual_seed(0)
inner = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
if hold:
    inner.add_module("wide", nn.Linear(1, WIDE))
    inner.add_module("sum", nn.Linear(WIDE, 1))
model = KINDS[kind](inner)
torch.manual_seed(session.rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = TensorDataset(torch.linspace(-1, 1, 64 * 8).view(64, 8))
loader = DataLoader(data, 4, sampler=DistributedSampler(data), num_workers=1)
session.protect(model=model, optimizer=optimizer, loader=loader)


losses: list[float] = []


def wait_s() -> float:
    """Return how long a step lasts: 20 ms without HOLD, and with it up to 20 s for the last 60."""
    if not (hold and hold.exists()):
        return 0.02
    return pace_s or min(1.0, 0.02 * 1.1 ** max(0, len(losses) - steps + 60))


def train_step(batch: list[torch.Tensor]) -> float:
    optimizer.zero_grad()
    loss = (model(batch[0]) ** 2).mean()
    loss.backward()
    threading.Event().wait(wait_s())
    optimizer.step()
    return loss.item()


for batch in session.batches(loader, until=steps):
    loss = session.run(train_step, batch)
    losses.append(loss)
    while hold and len(losses) == steps - 10 and hold.exists():
        threading.Event().wait(0.05)

digest = hashlib.sha256()
for value in model.state_dict().values():
    own = value.to_local() if isinstance(value, DTensor) else value
    digest.update(own.numpy().tobytes())
out.mkdir(exist_ok=True)
results = [loss.hex() for loss in losses]
(out / f"{session.rank}.json").write_text(json.dumps([len(losses), digest.hexdigest(), results]))
