"""HSDP over blocks that backward computes again: checkpoint in both modes, and its wrapper."""
# ranks: 4

import torch
from digests import write_digests
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import outlast


def block():
    return nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Tanh())


class Net(nn.Module):
    """Three blocks, each checkpointed in another way."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(9, 16), nn.Linear(16, 5)
        self.blocks = nn.ModuleList([block(), block(), checkpoint_wrapper(block())])

    def forward(self, x):
        x = self.first(x)
        x = x + checkpoint(self.blocks[0], x, use_reentrant=False)
        x = x + checkpoint(self.blocks[1], x, use_reentrant=True)
        return self.head(x + self.blocks[2](x))


session = outlast.init()
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = Net()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(70 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(7, 9)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
