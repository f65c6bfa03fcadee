"""A job whose steps take a given time, in which its processes do not need the processor."""

from __future__ import annotations

import argparse
import threading
from typing import Any

import torch
from torch import nn

import outlast


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--out", required=True)
    words.add_argument("--steps", type=int, default=100)
    words.add_argument("--pace", type=float, default=0.04)
    words.add_argument("--more-work-of", type=int, default=-1)
    words.add_argument("--from-step", type=int, default=0)
    given = words.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    idle = threading.Event()
    session = outlast.init()
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.protect(model=model, optimizer=optimizer)

    def train(index: Any) -> None:
        is_more = session.rank == given.more_work_of and session.step_index >= given.from_step
        idle.wait((3 if is_more else 1) * given.pace)  # the work of a step
        optimizer.zero_grad()
        model(torch.full((2, 8), float(index % 5))).square().mean().backward()
        optimizer.step()

    for index in session.batches(None, until=given.steps):
        session.run(train, index)


if __name__ == "__main__":
    main()
