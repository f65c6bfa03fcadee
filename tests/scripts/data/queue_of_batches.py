"""A queue that a thread fills, and from which the loop takes its batches."""
# refused: take values from ready, a Queue

import queue
import threading

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
ready = queue.Queue(2)


def read():
    for n in range(1000):
        ready.put(torch.full((5, 8), float(n % 7) / 7 + session.rank))


threading.Thread(target=read, daemon=True).start()


def train_step(x):
    optimizer.zero_grad()
    loss = (model(x) - 1).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for _index in session.batches(None, until=12):
    x = ready.get()
    session.run(train_step, x)
write_digests(session, model=model, optimizer=optimizer)
