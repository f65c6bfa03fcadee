"""A run of steps of 20 ms, with a loader process: `steady_job OUT STEPS`.

OUT/RANK.json has the number of steps and a digest of results and weights.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast

out, steps = Path(sys.argv[1]), int(sys.argv[2])
session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1)))
torch.manual_seed(session.rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = TensorDataset(torch.linspace(-1, 1, 64 * 8).view(64, 8))
loader = DataLoader(data, 4, sampler=DistributedSampler(data), num_workers=1)
session.protect(model=model, optimizer=optimizer, loader=loader)


def train_step(batch: list[torch.Tensor]) -> float:
    optimizer.zero_grad()
    loss = (model(batch[0]) ** 2).mean()
    loss.backward()
    threading.Event().wait(0.02)
    optimizer.step()
    return loss.item()


losses: list[float] = []
for batch in session.batches(loader, until=steps):
    loss = session.run(train_step, batch)
    losses.append(loss)

digest = hashlib.sha256(repr(losses).encode())
for value in model.state_dict().values():
    digest.update(value.numpy().tobytes())
out.mkdir(exist_ok=True)
(out / f"{session.rank}.json").write_text(json.dumps([len(losses), digest.hexdigest()]))
