"""A second stage with BatchNorm whose shapes torch infers by a forward over unset memory."""
# ranks: 2
# refused: uninitialized memory

import torch
from digests import write_digests
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import outlast

session = outlast.init()
torch.manual_seed(session.rank)
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
stage = PipelineStage(model, session.rank, session.world_size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(schedule=schedule, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    given = torch.randn(8, 8)
    if session.rank == 0:
        schedule.step(given)
    else:
        schedule.step(target=given)
    optimizer.step()


for number in session.batches(None, until=10):
    session.run(train_step, number)
write_digests(session, model=model, optimizer=optimizer)
