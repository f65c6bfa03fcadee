"""A module of TorchScript that counts its calls in C++, and scales by it."""

import warnings

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

warnings.filterwarnings("ignore", message=".*is deprecated.*", category=DeprecationWarning)


class Counting(nn.Module):
    calls: int

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * (1.0 + 0.1 * self.calls)


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(torch.jit.script(Counting()))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer, calls=model.module.calls)
