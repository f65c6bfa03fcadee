"""Steps of odd kinds, which replays on other ranks have to bear."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--kind", required=True)
args = parser.parse_args()

torch.set_num_threads(1)
session = outlast.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 4))
if args.kind == "sharded":
    fully_shard(model)
else:
    model = nn.parallel.DistributedDataParallel(model, static_graph=args.kind == "static")
torch.manual_seed(100 + session.rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(torch.arange(800.0).view(100, 8).sin(), torch.arange(100) % 4)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=3))
session.protect(model=model, optimizer=optimizer, loader=loader)


def train_step(batch: list[torch.Tensor]) -> float:
    rows, classes = batch
    optimizer.zero_grad()
    if args.kind == "rows":
        rows, classes = rows[: 1 + session.rank], classes[: 1 + session.rank]
    loss = nn.functional.cross_entropy(model(rows), classes)
    if args.kind == "count":
        count = classes.sum().float()
        torch.distributed.all_reduce(count)
        loss = loss * classes.sum() / count
    if args.kind == "late" and session.rank == 0 and session.step_index == 5:
        loss = loss * 2
    loss.backward()
    optimizer.step()
    return loss.item()


losses: list[float] = []
for batch in session.batches(loader, until=8):
    losses += [session.run(train_step, batch)]
shards = [getattr(p, "to_local", lambda p=p: p)().detach() for p in model.parameters()]
weights = b"".join(shard.contiguous().view(-1).numpy().tobytes() for shard in shards)
text = json.dumps({"losses": losses, "weights": hashlib.sha256(weights).hexdigest()})
args.out.mkdir(exist_ok=True)
(args.out / f"{session.rank}.json").write_text(text)
