"""Meters in a dict by member of an enumeration."""
# refused: changes meters (dict)

from enum import Enum

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model=model, optimizer=optimizer)
torch.manual_seed(3 + session.rank)


class Split(Enum):
    TRAIN = 1
    VAL = 2


class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value):
        self.total += value
        self.count += 1


meters = {Split.TRAIN: Meter(), Split.VAL: Meter()}


def train_step(index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    dist.all_reduce(loss.detach())
    meters[Split.TRAIN].update(loss.item())
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=12):
    session.run(train_step, index)
    if session.step_index % 4 == 0:
        for meter in meters.values():
            session.report(mean=meter.total / max(meter.count, 1))
write_digests(
    session, model=model, optimizer=optimizer, meters=[(m.total, m.count) for m in meters.values()]
)
