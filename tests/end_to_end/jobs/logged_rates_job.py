"""Job of the references' kind: `logged_rates_job --out=DIR`.

A generator of a logger around the loader counts and sums. A rate that is set by hand before the
step, one that a scheduler changes in it, and one that changes behind it are logged behind it.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()
STEPS, RANKS = 16, 2
session = outlast.init()
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
model = DistributedDataParallel(net)
first = torch.optim.AdamW(net[0].parameters(), lr=0.1)
second = torch.optim.SGD(net[1].parameters(), lr=0.1, momentum=0.9)
inside = torch.optim.lr_scheduler.StepLR(first, 2, 0.5)
behind = torch.optim.lr_scheduler.ExponentialLR(second, 0.9)
data = TensorDataset(torch.randn(STEPS * RANKS * 2, 4))
loader = DataLoader(data, 2, sampler=DistributedSampler(data))
session.protect(model=model, first=first, second=second, inside=inside, behind=behind)


class Logger:
    """Rows of what is logged."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []

    def log_every(self, batches: Iterable[list[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
        """Yield the batches; a row of counts is added behind each."""
        count, window = 0, deque[float](maxlen=3)
        for batch in batches:
            count += len(batch)
            window.append(batch[0].sum().item())
            yield batch
            self.rows.append([count, sum(window)])


def train_step(batch: list[torch.Tensor]) -> float:
    first.zero_grad()
    second.zero_grad()
    loss = model(batch[0]).pow(2).mean()
    loss.backward()
    first.step()
    second.step()
    inside.step()
    return loss.item()


logger = Logger()
for _ in session.epochs(1):
    for batch in logger.log_every(session.batches(loader)):
        for group in first.param_groups:
            group["weight_decay"] = 0.01 * session.step_index
        loss = session.run(train_step, batch)
        rates = [group[key] for group in first.param_groups for key in ("lr", "weight_decay")]
        behind.step()
        logger.rows.append([loss, *rates, *inside.get_last_lr(), *behind.get_last_lr()])
rank = dist.get_rank()
weights = [parameter.tolist() for parameter in model.parameters()]
args.out.mkdir(exist_ok=True)
(args.out / f"{rank}.json").write_text(json.dumps({"rows": logger.rows, "weights": weights}))
