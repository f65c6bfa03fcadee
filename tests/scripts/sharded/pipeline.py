"""A pipeline: two stages, and GPipe's schedule of four micro-batches."""
# ranks: 2
# refused: stages of a pipeline

import torch
from digests import write_digests
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import outlast

session = outlast.init()
torch.manual_seed(session.rank)
model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
stage = PipelineStage(model, session.rank, session.world_size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(7)
session.protect(model=model, optimizer=optimizer)


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


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
