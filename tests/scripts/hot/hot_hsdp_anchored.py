"""Hot spares for HSDP whose loss pulls shards towards their first values, which nobody protects"""
# ranks: 4

import torch
from digests import write_digests
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast

session = outlast.init(hot_spares=True)
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
anchors = [parameter.detach().clone() for parameter in model.parameters()]
locals_of_anchors = [anchor.to_local().clone() for anchor in anchors]
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
data = TensorDataset(torch.randn(320, 8), torch.randn(320, 4))
loader = DataLoader(data, 8, sampler=DistributedSampler(data))
session.protect(model=model, optimizer=optimizer, loader=loader)


def train_step(batch):
    inputs, target = batch
    optimizer.zero_grad()
    loss = (model(inputs) - target).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter, anchor, local in zip(
            model.parameters(), anchors, locals_of_anchors, strict=True
        ):
            parameter.grad.add_(parameter - anchor, alpha=0.1)
            parameter.grad.to_local().sub_(local, alpha=0.01)
    session.report(loss=loss.item())
    optimizer.step()


for batch in session.batches(loader, until=10):
    session.run(train_step, batch)
write_digests(session, model=model, optimizer=optimizer)
