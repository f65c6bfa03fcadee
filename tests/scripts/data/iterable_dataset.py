"""An IterableDataset of unknown length, sharded by rank, with a shuffle buffer."""

import random

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import outlast


class Stream(IterableDataset):
    """Lines of a file, every second one, through a shuffle buffer of eight."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def __iter__(self):
        buffer = []
        for number in range(self.rank, 200, self.world):
            buffer.append(number)
            if len(buffer) == 8:
                yield torch.full((4,), buffer.pop(random.randrange(8)) / 200)
        yield from (torch.full((4,), number / 200) for number in buffer)


session = outlast.init()
random.seed(session.rank)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(Stream(session.rank, session.world_size), batch_size=16)
seen = session.state.setdefault("seen", [])
session.protect(model=model, optimizer=optimizer, loader=loader)


def train_step(batch):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    seen.append(batch.sum().item())
    session.report(loss=loss.item())
    optimizer.step()


for batch in session.batches(loader, epochs=2):
    session.run(train_step, batch)
write_digests(session, model=model, seen=seen, python=random.getstate())
