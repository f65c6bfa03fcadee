"""Interleaved zero bubble: a schedule that divides each backward into two parts."""
# ranks: 2
# refused: is a ScheduleInterleavedZeroBubble, which has not been tried

import torch
from digests import write_digests
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

import outlast

session = outlast.init()
torch.manual_seed(session.rank)
blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
stages = [
    PipelineStage(block, session.rank + 2 * turn, 4, torch.device("cpu"))
    for turn, block in enumerate(blocks)
]
schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-2)
session.protect(schedule=schedule, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    if session.rank == 0:
        schedule.step(torch.ones(8, 8))
    else:
        schedule.step(target=torch.ones(8, 8))
    optimizer.step()


for number in session.batches(None, until=10):
    session.run(train_step, number)
write_digests(session, blocks=blocks, optimizer=optimizer)
