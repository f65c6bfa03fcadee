"""Pseudo labels: the loop appends confident samples to the dataset's list."""

import torch
from digests import write_digests
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import outlast

session = outlast.init()
torch.manual_seed(0)


class Growing(Dataset):
    def __init__(self):
        self.items = [(torch.full((6,), i / 12.0), i % 3) for i in range(12)]

    def __len__(self):
        return 400

    def __getitem__(self, i):
        return self.items[i % len(self.items)]


data = Growing()
loader = DataLoader(data, batch_size=4, shuffle=True)
model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
torch.manual_seed(50 + session.rank)

session.protect(model=model, optimizer=optimizer, loader=loader)


def train_step(batch):
    x, y = batch
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()
    return loss.item()


for batch in session.batches(loader, until=10):
    session.run(train_step, batch)
    with torch.no_grad():
        x = torch.randn(2, 6)
        for each, y in zip(x, model.module(x).argmax(1).tolist(), strict=False):
            data.items.append((each, y))
write_digests(session, model=model, optimizer=optimizer, n=len(data.items))
