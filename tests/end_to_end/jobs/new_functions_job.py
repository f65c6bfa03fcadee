"""Functions that a loop over epochs makes anew: `new_functions_job --out=DIR --kind=KIND`.

KIND: `nested` (one in each step, with its batch and the counts of its epoch), `inline` (a closure
made in the call of `run`), `object` (a method of an object made in the call).
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path)
parser.add_argument("--kind")
args = parser.parse_args()
session = outlast.init()
torch.manual_seed(0)
inputs = torch.randn(48, 4)
data = TensorDataset(inputs, torch.arange(48) % 3)
sampler = DistributedSampler(data)
loader = DataLoader(data, 4, sampler=sampler)
model = DistributedDataParallel(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
session.protect(model=model, optimizer=optimizer)
Batch = list[Tensor]
Result = tuple[int, str]


def train(x: Tensor, target: Tensor, count: int) -> float:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), target) * (1 + count / 10)
    loss.backward()
    optimizer.step()
    return loss.item()


def make_step() -> Callable[[Batch], Result]:
    count = 0

    def step(batch: Batch) -> Result:
        nonlocal count
        count += 1
        return count, train(*batch, count).hex()

    return step


class Trainer:
    def __init__(self) -> None:
        self.count = 0

    def step(self, batch: Batch) -> Result:
        self.count += 1
        return self.count, train(*batch, self.count).hex()


def nested() -> list[Result]:
    count, results = 0, []
    for x, target in session.batches(loader):

        def step() -> Result:
            nonlocal count
            count += 1
            target.clamp_(max=2)  # noqa: B023 - a name that the step may change in place
            return count, train(x, target, count).hex()  # noqa: B023 - it is called at once

        results.append(session.run(step))
    return results


def inline() -> list[Result]:
    results: list[Result] = []
    for batch in session.batches(loader):
        result = session.run(make_step() if args.kind == "inline" else Trainer().step, batch)
        results.append(result)
    return results


@torch.no_grad()
def evaluate() -> float:
    total = model(inputs[session.rank :: session.world_size]).sum()
    dist.all_reduce(total)
    return total.item()


history = []
for epoch in session.epochs(3):
    sampler.set_epoch(epoch)
    results = nested() if args.kind == "nested" else inline()
    history.append([results, session.run(evaluate)])
args.out.mkdir(exist_ok=True)
weights = [parameter.tolist() for parameter in model.parameters()]
(args.out / f"{session.rank}.json").write_text(json.dumps([history, weights]))
