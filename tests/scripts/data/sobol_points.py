"""A PINN: the loop draws collocation points from a quasi-random sequence."""
# refused: changes engine (SobolEngine)

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model=model, optimizer=optimizer)
torch.manual_seed(3 + session.rank)
engine = torch.quasirandom.SobolEngine(8, scramble=True, seed=session.rank)


def train_step(x):
    optimizer.zero_grad()
    loss = (model(x) - 1).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for _index in session.batches(None, until=12):
    x = engine.draw(5)
    session.run(train_step, x)
write_digests(session, model=model, optimizer=optimizer)
