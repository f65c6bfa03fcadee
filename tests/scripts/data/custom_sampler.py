"""A custom sampler: buckets of like lengths, shuffled by a generator of its own."""
# steps: 12

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import outlast


class Buckets:
    """Batches of sequences of like lengths, in an order drawn anew each epoch."""

    def __init__(self, lengths, rank, world):
        self.order = sorted(range(len(lengths)), key=lengths.__getitem__)[rank::world]
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self):
        batches = [self.order[i : i + 4] for i in range(0, len(self.order), 4)]
        for at in torch.randperm(len(batches), generator=self.generator).tolist():
            yield batches[at]

    def __len__(self):
        return (len(self.order) + 3) // 4


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
samples = [(index, torch.randn(4)) for index in range(36)]
sampler = Buckets([7 * index % 11 for index in range(36)], session.rank, session.world_size)
loader = DataLoader(samples, batch_sampler=sampler)
seen = session.state.setdefault("seen", [])
session.protect(model=model, optimizer=optimizer, loader=loader)


def train_step(batch):
    indices, x = batch
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    seen.append(indices.tolist())
    session.report(loss=loss.item())
    optimizer.step()


for batch in session.batches(loader, until=12):
    session.run(train_step, batch)
write_digests(session, model=model, optimizer=optimizer, seen=seen)
