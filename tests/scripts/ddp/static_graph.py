"""A static graph: DDP(static_graph=True) with activation checkpointing, over several buckets."""
# ranks: 3

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import outlast


class Net(nn.Module):
    """Blocks that are computed again in backward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: torch.tanh(block(x)), x, use_reentrant=False)
        return self.head(x)


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(Net(), static_graph=True, bucket_cap_mb=0.001)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(20 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 16)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
