"""HSDP with a moving average of DTensors in a Replicated object."""
# ranks: 4
# refused: as parameters of a protected module

import torch
from digests import write_digests
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import outlast


class Average:
    """A moving average that keeps tensors by name."""

    def __init__(self, model):
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for name, p in model.named_parameters():
            self.values[name].lerp_(p, 0.1)

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, state):
        for name, value in state.items():
            self.values[name].copy_(value)


session = outlast.init()
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = nn.Sequential(nn.Linear(9, 24), nn.GELU(), nn.Linear(24, 5))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
average = Average(model)
torch.manual_seed(70 + session.rank)
session.protect(model=model, optimizer=optimizer, average=outlast.Replicated(average))


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(7, 9)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()
    average.update(model)


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer, average=average.values)
