"""Training job that logs which samples each rank has trained in which step."""

from __future__ import annotations

import argparse
import json
import os
import threading
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import outlast


class Samples(Dataset):
    """Items with their index."""

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        noise = 0.0 if args.kind == "plain" else 0.1
        return index, torch.full((6,), index / 90) + noise * torch.randn(6)


parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path, nargs="?")
parser.add_argument("--out", type=Path)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--pace", type=float, default=0.0, help="seconds a step")
parser.add_argument("--steps", type=int, help="in place of epochs")
parser.add_argument("--gate", type=Path, help="made at step 2: workers wait while it is there")
parser.add_argument("--kind", default="", help="what the job does that others do not")
args = parser.parse_args()
args.out = args.out or args.folder
args.out.mkdir(exist_ok=True)

while args.gate and args.gate.exists():
    threading.Event().wait(0.02)
session = outlast.init()
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.0 if args.kind == "plain" else 0.1), nn.Linear(16, 3)
)
model = nn.parallel.DistributedDataParallel(model)
torch.manual_seed(100 + session.rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = Samples()
sampler = DistributedSampler(data, seed=1) if args.kind != "random" else None
loader = DataLoader(data, batch_size=3, sampler=sampler, shuffle=sampler is None, drop_last=True)
torch.manual_seed(1)
twins = [nn.parallel.DistributedDataParallel(nn.Linear(6, 3)) for _ in range(2)]
twins[1].load_state_dict(twins[0].state_dict())
optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in twins]
kept = {"twin": twins[0], "other": twins[1], "first": optimizers[0], "second": optimizers[1]}
kept = kept if args.kind == "phases" else {}
session.protect(model=model, optimizer=optimizer, loader=loader, **kept)


def train_step(batch: list[torch.Tensor]) -> float:
    index, x = batch
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), index % 3)
    loss.backward()
    mean = loss.detach().clone()
    torch.distributed.all_reduce(mean)
    if args.kind == "gathers":
        torch.distributed.all_gather([torch.zeros(()) for _ in range(session.world_size)], mean)
    if args.kind == "table":
        by_rank = torch.zeros(session.world_size)
        by_rank[session.rank] = loss.detach()
        torch.distributed.all_reduce(by_rank)
    optimizer.step()
    return float(mean) / session.world_size


def train_twin(which: int, batch: list[torch.Tensor]) -> None:
    index, _ = batch
    optimizers[which].zero_grad()
    nn.functional.cross_entropy(
        twins[which](index[:, None] / 90 + torch.ones(6)), index % 3
    ).backward()
    optimizers[which].step()


def train_first(batch: list[torch.Tensor]) -> None:
    train_twin(0, batch)


def train_second(batch: list[torch.Tensor]) -> None:
    train_twin(1, batch)


def mean_index() -> float:
    total = torch.stack([batch[0].double().sum(), torch.tensor(float(len(batch[0])))])
    torch.distributed.all_reduce(total)
    return float(total[0] / total[1])


def evaluate() -> float:
    with torch.no_grad():
        total = model(torch.linspace(-1, 1, 60).view(10, 6)).sum()
    torch.distributed.all_reduce(total)
    return float(total)


losses: list[float] = []
means: list[float] = []
with (args.out / f"{session.rank}.{os.getpid()}.jsonl").open("a") as samples:
    ends = {"until": args.steps} if args.steps else {"epochs": args.epochs}
    for batch in session.batches(loader, **ends):
        threading.Event().wait(args.pace)
        step = session.step_index
        if args.gate and step == 2:
            args.gate.touch()
        losses.append(session.run(train_step, batch))
        if args.kind == "phases":
            session.run(train_first, batch)
            session.run(train_second, batch)
            means.append(session.run(mean_index))
        line = [step, session.rank, batch[0].tolist(), session.present]
        samples.write(json.dumps([*line, session.is_idle]) + "\n")
        samples.flush()
        if session.step_index % 4 == 0:
            losses.append(session.run(evaluate))
weights = [float(each.detach().double().sum()) for each in model.parameters()]
report = {"losses": losses, "weights": weights, "present": session.present, "means": means}
report["twins"] = [float(each.module.weight.detach().double().sum()) for each in twins]
(args.out / f"{session.rank}.json").write_text(json.dumps(report))
