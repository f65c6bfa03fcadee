"""HSDP whose loop sets set_gradient_divide_factor once, in the middle of the run."""
# ranks: 4

import torch
from digests import write_digests
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import outlast

session = outlast.init()
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = nn.Sequential(nn.Linear(9, 24), nn.GELU(), nn.Linear(24, 5))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
for part in (model, model[0], model[2]):
    part.set_force_sum_reduction_for_comms(True)  # gloo has no sums that are multiplied first
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
torch.manual_seed(70 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(7, 9)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    if index == 2:
        for part in (model, model[0], model[2]):
            part.set_gradient_divide_factor(3.0)
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
