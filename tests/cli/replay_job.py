"""Small DDP job with dropout. REPLAY_BUG selects its nondeterminism and the place."""

from __future__ import annotations

import os

import torch
from torch import nn

import outlast

STEPS, WRONG_STEP, WRONG_RANK = 12, 6, 1

session = outlast.init()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(
    nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))
)
torch.manual_seed(1 + session.rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model=model, optimizer=optimizer)
seed = session.shared("seed", lambda: int.from_bytes(os.urandom(4), "little"))


def train_step(index: int) -> float:
    wrong = session.rank == WRONG_RANK and session.step_index + 1 == WRONG_STEP
    if wrong and os.environ.get("REPLAY_BUG") == "raise":
        print("the next record is bad", flush=True)
        raise ValueError(f"bad record, read with {os.environ.get('WANDB_API_KEY')}")
    if wrong and os.environ.get("REPLAY_BUG") == "seed":
        torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    x = torch.full((4, 8), (seed % 89 + index) / 89)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()
    return loss.item()


for index in session.batches(None, until=STEPS):
    session.run(train_step, index)
