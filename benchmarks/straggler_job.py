"""Steps of 100 ms of work that needs no processor, for `sentinel_stragglers.py`."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import nn

import outlast

STEPS, WORK_S = 400, 0.1


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    idle, session = threading.Event(), outlast.init()
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.protect(model=model, optimizer=optimizer)

    def train(index: Any) -> None:
        idle.wait(WORK_S)
        optimizer.zero_grad()
        model(torch.full((2, 8), float(index % 5))).square().mean().backward()
        optimizer.step()

    for index in session.batches(None, until=STEPS):
        session.run(train, index)


if __name__ == "__main__":
    sys.exit(main())
