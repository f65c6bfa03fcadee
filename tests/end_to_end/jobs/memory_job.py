"""Job whose step can run in parts. `--by-hand STEP` accumulates two parts there by itself."""

from __future__ import annotations

import argparse
import hashlib
import json
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast
from outlast.worker.sentinels.optimizer_memory import StateOffload

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--by-hand", type=int, default=-1)
parser.add_argument("--whole", action="store_true", help="a step without session.split")
parser.add_argument("--greedy", type=int, default=0, help="a step that allocates this many GiB")
parser.add_argument("--away", action="store_true", help="state may go to a host that is a device")
args = parser.parse_args()

session = outlast.init()
if args.away:
    session._worker.phases.memory.offload = StateOffload(is_far=lambda _: True)
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(
    nn.Sequential(nn.Linear(8, 128), nn.GELU(), nn.Linear(128, 4))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
loader = DataLoader(data, batch_size=6, sampler=DistributedSampler(data, seed=3), drop_last=True)
losses: list[float] = []
session.protect(model=model, optimizer=optimizer, loader=loader, losses=losses)


def loss_of(part: list[torch.Tensor]) -> torch.Tensor:
    x, y = part
    return nn.functional.cross_entropy(model(x), y)


def train_step(batch: list[torch.Tensor]) -> float:
    optimizer.zero_grad()
    total = 0.0
    if args.greedy and session.step_index == 3 and session.rank == 1:
        torch.empty(args.greedy << 30, dtype=torch.uint8)
    if args.by_hand == session.step_index + 1:
        for half in range(2):
            rows = slice(3 * half, 3 * half + 3)
            with nullcontext() if half else model.no_sync():
                loss = loss_of([each[rows] for each in batch]) * 0.5
                loss.backward()
            total += loss.item()
    elif args.whole:
        loss = loss_of(batch)
        loss.backward()
        total += loss.item()
    else:
        for part, share in session.split(batch):
            loss = loss_of(part) * share
            loss.backward()
            total += loss.item()
    optimizer.step()
    return total


for batch in session.batches(loader, until=7):
    losses.append(session.run(train_step, batch))
    session.report(loss=losses[-1])

digest = hashlib.sha256()
for tensor in model.state_dict().values():
    digest.update(tensor.numpy().tobytes())
for state in optimizer.state.values():
    digest.update(state["exp_avg_sq"].numpy().tobytes())
args.out.mkdir(exist_ok=True)
result = {"digest": digest.hexdigest(), "losses": [repr(one) for one in losses]}
(args.out / f"{session.rank}.json").write_text(json.dumps(result))
