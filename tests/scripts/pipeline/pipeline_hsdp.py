"""Interleaved 1F1B whose stages are sharded by fully_shard: two ranks, two replicas, one shard."""
# ranks: 4

import torch
from digests import write_digests
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import outlast

session = outlast.init()
names = ("stage", "replica", "shard")
mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=names)
first = mesh.get_local_rank("stage")
torch.manual_seed(first)
blocks = nn.ModuleList(
    nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8)) for _ in range(2)
)
for block in blocks:
    fully_shard(block[0], mesh=mesh["replica", "shard"])
    fully_shard(block, mesh=mesh["replica", "shard"])
stages = [
    PipelineStage(block, first + 2 * turn, 4, torch.device("cpu"), group=mesh.get_group("stage"))
    for turn, block in enumerate(blocks)
]
schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-2)
torch.manual_seed(70 + mesh.get_local_rank("replica"))
session.protect(schedule=schedule, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    given, target = torch.randn(8, 8), torch.randn(8, 8)
    losses = []
    if first == 0:
        schedule.step(given)
    else:
        schedule.step(target=target, losses=losses)
        session.report(loss=sum(loss.item() for loss in losses))
    optimizer.step()


for number in session.batches(None, until=10):
    session.run(train_step, number)
write_digests(session, blocks=blocks, optimizer=optimizer)
