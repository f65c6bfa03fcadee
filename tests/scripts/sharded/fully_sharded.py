"""FSDP2: fully_shard on a 1-D mesh: no other rank holds a shard; gradients are clipped."""
# ranks: 2

import torch
from digests import write_digests
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import outlast

session = outlast.init()
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (session.world_size,))
model = nn.Sequential(nn.Linear(9, 24), nn.GELU(), nn.Linear(24, 5))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(70 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(7, 9)).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    session.report(loss=loss.item())
    optimizer.step()


@torch.no_grad()
def evaluate():
    session.report(accuracy=model(torch.ones(3, 9)).sum().item())


for index in session.batches(None, until=10):
    session.run(train_step, index)
    if session.step_index % 3 == 0:
        session.run(evaluate)
write_digests(session, model=model, optimizer=optimizer)
