"""A thread pool loads the next batch while the step runs."""
# refused: changes future (Future)

from concurrent.futures import ThreadPoolExecutor

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


def load(n):
    return torch.full((5, 8), float(n % 7) / 7 + session.rank)


pool = ThreadPoolExecutor(1)
future = pool.submit(load, 0)


def train_step(x):
    optimizer.zero_grad()
    loss = (model(x) - 1).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=12):
    x = future.result()
    future = pool.submit(load, index + 1)
    session.run(train_step, x)
pool.shutdown()
write_digests(session, model=model, optimizer=optimizer)
