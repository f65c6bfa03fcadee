"""A dataclass as the training state, handed to protect as it is."""

from dataclasses import dataclass

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast


@dataclass
class Progress:
    """How far the training is."""

    tokens: int = 0
    best: float = float("inf")


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

progress = Progress()
session.protect(model=model, optimizer=optimizer, progress=progress)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    progress.tokens += 40
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer, progress=progress)
