"""The metric logger of vision scripts: a defaultdict of meters, one of them made late."""
# steps: 12

from collections import defaultdict, deque

import torch
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


class SmoothedValue:
    def __init__(self, window=4):
        self.deque = deque(maxlen=window)
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n


class MetricLogger:
    def __init__(self):
        self.meters = defaultdict(SmoothedValue)

    def update(self, **values):
        for name, value in values.items():
            self.meters[name].update(value)


log = MetricLogger()


def train_step(index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()
    return loss.item()


for index in session.batches(None, until=12):
    log.update(loss=session.run(train_step, index), lr=optimizer.param_groups[0]["lr"])
    if session.step_index % 5 == 0:
        log.update(fifth=session.step_index)
    session.report(mean=log.meters["loss"].total / log.meters["loss"].count)
write_digests(
    session,
    model=model,
    optimizer=optimizer,
    log={k: (list(m.deque), m.total, m.count) for k, m in log.meters.items()},
)
