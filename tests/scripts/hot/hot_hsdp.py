"""Hot spares for HSDP on a 2x2 mesh: uneven shards, bf16 reduction, clipping, an evaluation"""
# ranks: 4

import torch
from digests import write_digests
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast

session = outlast.init(hot_spares=True)
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = nn.Sequential(nn.Linear(9, 23), nn.GELU(), nn.Dropout(0.1), nn.Linear(23, 5))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in (model[0], model[3]):
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
data = TensorDataset(torch.randn(320, 9), torch.randn(320, 5))
loader = DataLoader(data, 8, sampler=DistributedSampler(data, seed=4))
session.protect(model=model, optimizer=optimizer, schedule=schedule, loader=loader)


def train_step(batch):
    inputs, target = batch
    optimizer.zero_grad()
    loss = (model(inputs) - target).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    session.report(loss=loss.item(), norm=norm.full_tensor().item())
    optimizer.step()
    schedule.step()


@torch.no_grad()
def evaluate():
    session.report(accuracy=model(torch.ones(3, 9)).sum().item())


for batch in session.batches(loader, until=10):
    session.run(train_step, batch)
    if session.step_index % 4 == 0:
        session.run(evaluate)
write_digests(session, model=model, optimizer=optimizer, rates=schedule.get_last_lr())
