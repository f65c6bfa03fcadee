"""LocalSGD with the average in a phase of its own, between steps."""
# refused: hold different bytes of

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn

import outlast

session = outlast.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


@torch.no_grad()
def average():
    for parameter in model.parameters():
        dist.all_reduce(parameter)
        parameter /= session.world_size


for index in session.batches(None, until=10):
    session.run(train_step, index)
    if session.step_index % 3 == 0:
        session.run(average)
write_digests(session, model=model, optimizer=optimizer)
