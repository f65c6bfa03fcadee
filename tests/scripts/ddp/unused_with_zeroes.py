"""Unused parameters whose gradients are zeroes, not None, so that AdamW decays them."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast


class TwoHeads(nn.Module):
    """One of two heads by step."""

    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x, head):
        return getattr(self, head)(self.body(x))


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(index):
    optimizer.zero_grad(set_to_none=False)
    loss = model(torch.randn(5, 8), "a" if index % 5 == 1 else "b").square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
