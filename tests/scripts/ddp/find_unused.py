"""Unused parameters: one of two heads by step, with find_unused_parameters=True."""
# ranks: 3

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast


class TwoHeads(nn.Module):
    """A trunk and the head that the task names."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(12, 24)
        self.heads = nn.ModuleList([nn.Linear(24, 2), nn.Linear(24, 5)])

    def forward(self, x, task):
        return self.heads[task](torch.relu(self.trunk(x)))


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(TwoHeads(), find_unused_parameters=True, bucket_cap_mb=0.001)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(40 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(index):
    optimizer.zero_grad()
    loss = model(torch.randn(6, 12), (index + session.rank) % 2).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
