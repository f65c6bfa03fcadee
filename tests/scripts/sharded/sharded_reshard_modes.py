"""HSDP in three modes of reshard_after_forward, with evaluations that leave parameters gathered."""
# ranks: 4

import torch
from digests import write_digests
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import outlast


class Net(nn.Module):
    """Blocks between an input and a head that belong to the root's own shards."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(9, 16), nn.Linear(16, 5)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


session = outlast.init()
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = Net()
for block, mode in zip(model.blocks, (True, False, None), strict=True):
    fully_shard(block, mesh=mesh, reshard_after_forward=mode)
fully_shard(model, mesh=mesh, reshard_after_forward=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(70 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(7, 9)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


@torch.no_grad()
def evaluate():
    session.report(accuracy=model(torch.ones(3, 9)).sum().item())


for index in session.batches(None, until=10):
    session.run(train_step, index)
    if session.step_index % 2 == 0:
        session.run(evaluate)
write_digests(session, model=model, optimizer=optimizer)
