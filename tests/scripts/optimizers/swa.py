"""SWA: averaged weights and their learning rate over the last steps."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import SWALR, AveragedModel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

averaged = AveragedModel(model.module)
scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=3)
torch.manual_seed(3 + session.rank)
session.protect(model=model, averaged=averaged, optimizer=optimizer, scheduler=scheduler)


def train_step(index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()
    if index >= 5:
        averaged.update_parameters(model.module)
        scheduler.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, averaged=averaged, optimizer=optimizer)
