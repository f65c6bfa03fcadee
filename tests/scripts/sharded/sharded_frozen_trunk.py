"""HSDP with a frozen trunk, and low-rank additions that learn."""
# ranks: 4

import torch
from digests import write_digests
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import outlast


class Adapted(nn.Module):
    """A frozen layer with a low-rank addition."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


session = outlast.init()
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = nn.Sequential(Adapted(9, 24), nn.GELU(), Adapted(24, 5))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
learning = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(learning, lr=1e-2)
torch.manual_seed(70 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(7, 9)).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(learning, 0.5)
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
