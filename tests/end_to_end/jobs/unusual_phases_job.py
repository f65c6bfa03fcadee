"""Phases before, after and inside the loop without a step, a stream, and a file between phases."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import outlast

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--die", nargs="*", default=[], help="RANK:PLACE:STEP, each once")
args = parser.parse_args()
session = outlast.init()
args.out.mkdir(exist_ok=True)


def reach(place: str) -> None:
    here = f"{session.rank}:{place}:{session.step_index}"
    if here in args.die and not (args.out / here).exists():
        (args.out / here).touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Stream:
    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(12):
            reach("draw")
            yield torch.full((4, 8), index / 12) + 0.1 * torch.randn(4, 8)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))
model = nn.parallel.DistributedDataParallel(model)
torch.manual_seed(1000 + session.rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model=model, optimizer=optimizer)
history = session.state.setdefault("history", [])


def look(x: torch.Tensor) -> float:
    reach("look")
    total = x.sum()
    torch.distributed.all_reduce(total)
    return total.item()


def train(x: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    reach("train")
    optimizer.step()
    return loss.item()


def evaluate() -> tuple[float, float]:
    # Everybody is in it before one dies: whom the first of all phases finds still setting up would
    # have to begin anew.
    torch.distributed.all_reduce(torch.zeros(1))
    reach("evaluate")
    with torch.no_grad():
        total = model(torch.linspace(-1, 1, 64).view(8, 8)).sum()
    torch.distributed.all_reduce(total)
    return total.item(), total.item() / 2


def last() -> float:
    reach("last")
    return evaluate()[0]


def digest() -> str:
    found = hashlib.sha256()
    for tensor in [*model.state_dict().values(), torch.get_rng_state()]:
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


results = [session.run(evaluate)]
for x in session.batches(Stream(), until=10):
    history.append(session.run(look, x))
    session.run(train, x)
    if session.step_index % 3 == 0:
        torch.save(model.state_dict(), args.out / f"model-{session.rank}.pt")
        history.append(session.run(evaluate))
results += [session.run(evaluate), session.run(last)]
saved = torch.load(args.out / f"model-{session.rank}.pt", weights_only=True)
sums = [tensor.double().sum().item() for tensor in saved.values()]
told = {"digest": digest(), "results": results, "history": session.state["history"], "saved": sums}
(args.out / f"{session.rank}.json").write_text(json.dumps(told))
torch.distributed.destroy_process_group()
