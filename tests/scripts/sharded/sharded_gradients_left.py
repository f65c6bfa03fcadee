"""FSDP2 whose step adds to the gradients of the phase before."""
# ranks: 2
# refused: steps with a gradient of

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
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(70 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(index):
    if index % 3 == 0:
        optimizer.zero_grad()
    loss = model(torch.randn(7, 9)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
