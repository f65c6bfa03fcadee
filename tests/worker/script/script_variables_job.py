"""Job whose script keeps state in its own variables.

`--way` selects the kind of state. Under torchrun nothing of Outlast is used: the reference result.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import outlast

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--way", default="")
parser.add_argument("--torchrun", action="store_true")
args = parser.parse_args()
STEPS = 8


class Plain:
    """Session that protects nothing."""

    def __init__(self) -> None:
        torch.distributed.init_process_group("gloo")
        self.rank, self.step_index = torch.distributed.get_rank(), 0

    def protect(self, **_: Any) -> None:
        pass

    def batches(self, _: None, until: int) -> Iterator[int]:
        yield from range(until)

    def run(self, step: Callable[[int], float], index: int) -> float:
        result = step(index)
        self.step_index += 1
        return result


session: Any = Plain() if args.torchrun else outlast.init()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)))
random.seed(session.rank)
torch.manual_seed(1000 + session.rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
draws = np.random.default_rng(session.rank)


def get_batch() -> torch.Tensor:
    return torch.randn(4, 4) + session.rank


X = get_batch()
best, count, t0 = float("inf"), 0, time.time()
history: list[float] = []
window: deque[float] = deque(maxlen=3)
cycle = itertools.cycle([0.1, 0.2, 0.3])
memo: dict[int, float] = {}
ema = nn.Linear(4, 1)


class Meter:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1


meter = Meter()


def descend(x: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    return loss.item()


def prefetch(_: int) -> float:
    global X
    loss = descend(X)
    X = get_batch()
    optimizer.step()
    return loss


def counted(_: int) -> float:
    global count
    count += 1
    meter.update(count)
    history.append(float(count))
    loss = descend(X * count + len(history) + meter.total / 10)
    optimizer.step()
    return loss


def drawn(_: int) -> float:
    loss = descend(X + float(draws.normal()))
    optimizer.step()
    return loss


def cycled(_: int) -> float:
    loss = descend(X + next(cycle))
    optimizer.step()
    return loss


def late(_: int) -> float:
    global count
    loss = descend(X + count)
    optimizer.step()
    count += 1
    return loss


def cached(index: int) -> float:
    if 7 not in memo:
        memo[7] = 0.5
    loss = descend(X + memo[7] + index)
    optimizer.step()
    return loss


def averaged(index: int) -> float:
    with torch.no_grad():
        ema.weight.lerp_(torch.full((1, 4), float(index + 1)), 0.1)
    loss = descend(X + float(ema.weight.sum()))
    optimizer.step()
    return loss


def clocked(_: int) -> float:
    loss = descend(X + time.perf_counter_ns() % 1000)
    optimizer.step()
    return loss


def plain(index: int) -> float:
    loss = descend(X + index)
    optimizer.step()
    return loss


def closure() -> Callable[[int], float]:
    x, seen = X, 0

    def step(_: int) -> float:
        nonlocal x, seen
        loss = descend(x + seen)
        x, seen = get_batch(), seen + 1
        optimizer.step()
        return loss

    return step


def in_main() -> dict[str, Any]:
    lowest, smooth, since = float("inf"), 0.0, time.time()
    total = Meter()
    for index in session.batches(None, until=STEPS):
        loss = session.run(plain, index)
        lowest = min(lowest, loss)
        smooth = 0.9 * smooth + 0.1 * loss
        total.update(loss)
        window.append(loss)
        since = max(since, time.time())
    return {"lowest": lowest, "smooth": smooth, "total": total.total, "window": list(window)}


WAYS = {
    "prefetch": prefetch, "counted": counted, "drawn": drawn, "cycled": cycled, "late": late,
    "cached": cached, "averaged": averaged, "clocked": clocked, "closure": closure(),
}  # fmt: skip
session.protect(model=model, optimizer=optimizer)
told: dict[str, Any] = {}
if args.way == "main":
    told = in_main()
elif args.way == "enumerate":
    for number, index in enumerate(session.batches(None, until=STEPS)):
        session.run(plain, index + number)
else:
    step = WAYS.get(args.way, plain)
    for index in session.batches(None, until=STEPS):
        loss = session.run(step, index)
        best = min(best, loss)
        if session.step_index % 3 == 0:
            history.append(loss)
    told = {"best": best, "history": history, "count": count, "meter": vars(meter)}
told["weights"] = hashlib.sha256(
    b"".join(p.detach().numpy().tobytes() for p in model.parameters())
).hexdigest()
told["random"] = [random.random(), float(torch.rand(1))]
args.out.mkdir(exist_ok=True)
(args.out / f"{session.rank}.json").write_text(json.dumps(told))
