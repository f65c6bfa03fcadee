"""An update by hand: parameters are changed under no_grad, without an optimizer."""
# refused: before the vote

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))

torch.manual_seed(3 + session.rank)
session.protect(model=model)


def train_step(_index):
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return loss.item()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model)
