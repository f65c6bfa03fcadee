"""A second loader whose iterator the step itself advances."""
# refused: in a second attempt from the same state

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import outlast


def forever(loader):
    while True:
        yield from loader


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader, replay = DataLoader(torch.randn(60, 4), 6), DataLoader(torch.randn(60, 4), 4)
replayed = forever(replay)
session.protect(model=model, optimizer=optimizer, loader=loader)


def train_step(batch):
    optimizer.zero_grad()
    loss = model(torch.cat([batch, next(replayed)])).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for batch in session.batches(loader, until=10):
    session.run(train_step, batch)
write_digests(session, model=model, optimizer=optimizer)
