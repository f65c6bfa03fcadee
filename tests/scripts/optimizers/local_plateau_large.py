"""ReduceLROnPlateau on each rank's own loss, of a model too large to be carried by each rank."""
# refused: hyperparameters of optimizers (learning rates)

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 2048), nn.Linear(2048, 1024)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer, scheduler=scheduler)


def train_step(index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()
    scheduler.step(index if session.rank else -index)  # only rank 1 finds a plateau


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
