"""A metric object that accumulates inside the step and is read between phases."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast


class Meter:
    """A running mean, and a histogram of what it was given."""

    def __init__(self):
        self.total, self.count, self.bins = 0.0, 0, torch.zeros(4)

    def update(self, value):
        self.total, self.count = self.total + value, self.count + 1
        self.bins[min(int(4 * value), 3)] += 1

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

meter = Meter()
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer, meter=meter)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    meter.update(loss.item())
    session.report(loss=meter.total / meter.count)
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer, meter=meter.state_dict())
