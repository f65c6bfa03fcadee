"""Stages with BatchNorm and shapes that the script gives, and evaluations of the schedule."""
# ranks: 4

import torch
from digests import write_digests
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import outlast

session = outlast.init()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "replica"))
index, replicas = mesh.get_local_rank("stage"), mesh.get_group("replica")
torch.manual_seed(index)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 8))
place = index, 2, torch.device("cpu")
shapes = torch.empty(2, 8, requires_grad=index == 1), torch.empty(2, 8, requires_grad=True)
stage = PipelineStage(model, *place, *shapes, group=mesh.get_group("stage"))
schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(70 + mesh.get_local_rank("replica"))
session.protect(schedule=schedule, optimizer=optimizer)


def forward_all(run):
    given, target = torch.randn(8, 8), torch.randn(8, 8)
    losses = []
    if stage.is_first:
        run(given)
    else:
        run(target=target, losses=losses)
    return [loss.item() for loss in losses]


def train_step(_index):
    optimizer.zero_grad()
    if losses := forward_all(schedule.step):
        session.report(loss=sum(losses))
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=replicas)
        parameter.grad.div_(2)
    optimizer.step()


def evaluate():
    optimizer.zero_grad()  # torch's eval divides gradients that it finds
    model.eval()
    with torch.no_grad():
        if losses := forward_all(schedule.eval):
            session.report(validation=sum(losses))
    model.train()


for number in session.batches(None, until=10):
    session.run(train_step, number)
    if number % 3 == 1:
        session.run(evaluate)
write_digests(session, model=model, optimizer=optimizer)
