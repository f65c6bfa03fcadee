"""An asynchronous generator of batches, whose next one the loop awaits."""
# refused: take values from batches, a async_generator

import asyncio

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


async def stream():
    for n in range(10_000):
        await asyncio.sleep(0)
        yield torch.full((5, 8), float(n % 7) / 7 + session.rank)


events = asyncio.new_event_loop()
batches = stream()


def train_step(x):
    optimizer.zero_grad()
    loss = (model(x) - 1).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for _index in session.batches(None, until=12):
    x = events.run_until_complete(batches.__anext__())
    session.run(train_step, x)
write_digests(session, model=model, optimizer=optimizer)
