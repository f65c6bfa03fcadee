"""Experts in an order that changes by step: gradients become ready in another order."""
# ranks: 3

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast


class Experts(nn.Module):
    """All experts take part, one after the other, from another one on each step."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(10, 10) for _ in range(4))

    def forward(self, x, first):
        for number in range(4):
            x = torch.tanh(self.experts[(first + number) % 4](x))
        return x


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(Experts(), bucket_cap_mb=0.0005)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(index):
    optimizer.zero_grad()
    loss = model(torch.randn(6, 10), 3 * index % 4).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
