"""Looped BFS on two ranks without replicas: four stages, two a rank; all ranks go back."""
# ranks: 2

import torch
from digests import write_digests
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleLoopedBFS

import outlast

session = outlast.init()
torch.manual_seed(session.rank)
blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
stages = [
    PipelineStage(block, session.rank + 2 * turn, 4, torch.device("cpu"))
    for turn, block in enumerate(blocks)
]
schedule = ScheduleLoopedBFS(stages, 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-2)
torch.manual_seed(7)
session.protect(schedule=schedule, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    given, target = torch.randn(8, 8), torch.randn(8, 8)
    losses = []
    if session.rank == 0:
        schedule.step(given)
    else:
        schedule.step(target=target, losses=losses)
        session.report(loss=sum(loss.item() for loss in losses))
    optimizer.step()


for number in session.batches(None, until=10):
    session.run(train_step, number)
write_digests(session, blocks=blocks, optimizer=optimizer)
