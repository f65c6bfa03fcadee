"""A loss function that remembers in its closure how often it was called, and scales by it."""
# ranks: 4

import torch
from digests import write_digests
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import outlast


def growing_loss():
    calls = []

    def loss(output, target):
        calls.append(1)
        return nn.functional.mse_loss(output, target) * (1 + 0.01 * len(calls))

    return loss


session = outlast.init()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "replica"))
index, replicas = mesh.get_local_rank("stage"), mesh.get_group("replica")
torch.manual_seed(index)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
stage = PipelineStage(model, index, 2, torch.device("cpu"), group=mesh.get_group("stage"))
schedule = ScheduleGPipe(stage, 4, loss_fn=growing_loss())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(70 + mesh.get_local_rank("replica"))
session.protect(schedule=schedule, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    given, target = torch.randn(8, 8), torch.randn(8, 8)
    losses = []
    if stage.is_first:
        schedule.step(given)
    else:
        schedule.step(target=target, losses=losses)
        session.report(loss=sum(loss.item() for loss in losses))
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=replicas)
        parameter.grad.div_(2)
    optimizer.step()


for number in session.batches(None, until=10):
    session.run(train_step, number)
write_digests(session, model=model, optimizer=optimizer)
