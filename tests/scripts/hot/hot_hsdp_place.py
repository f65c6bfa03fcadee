"""Hot spares for HSDP whose script keeps coordinate and peers, and samples by the mesh's rank"""
# ranks: 4

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast

session = outlast.init(hot_spares=True)
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
coordinate = mesh.get_coordinate()
peers = dist.get_process_group_ranks(mesh.get_group("shard"))
model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
data = TensorDataset(torch.randn(320, 8), torch.randn(320, 4))
sampler = DistributedSampler(data, mesh.size(), mesh.get_rank())
loader = DataLoader(data, 8, sampler=sampler)
session.protect(model=model, optimizer=optimizer, loader=loader)


def train_step(batch):
    inputs, target = batch
    optimizer.zero_grad()
    scale = 1 + coordinate[0] + sum(peers)
    loss = scale * (model(inputs) - target).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for batch in session.batches(loader, until=10):
    session.run(train_step, batch)
write_digests(session, model=model, optimizer=optimizer, place=(coordinate, peers))
