"""A module that counts its calls in a plain attribute, and scales by it."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast


class Counting(nn.Linear):
    """A layer whose noise gets smaller by call."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(Counting(8, 4))
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
write_digests(session, model=model, optimizer=optimizer)
