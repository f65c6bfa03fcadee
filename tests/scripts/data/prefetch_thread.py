"""A thread that prefetches batches through a queue."""

import queue
import threading

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast


class Prefetcher:
    """The batches of a loader, read ahead by a thread."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        ready = queue.Queue(maxsize=2)

        def read():
            for batch in self.loader:
                ready.put(batch)
            ready.put(None)

        threading.Thread(target=read, daemon=True).start()
        return iter(ready.get, None)

    def __len__(self):
        return len(self.loader)


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = [torch.full((3, 4), float(index + session.rank)) for index in range(5)]
seen = session.state.setdefault("seen", [])
session.protect(model=model, optimizer=optimizer)


def train_step(batch):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    seen.append(batch.sum().item())
    session.report(loss=loss.item())
    optimizer.step()


for batch in session.batches(Prefetcher(batches), epochs=2):
    session.run(train_step, batch)
write_digests(session, model=model, optimizer=optimizer, seen=seen)
