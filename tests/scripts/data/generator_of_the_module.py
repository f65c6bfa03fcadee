"""A dataset in the script's process that draws from a generator of the module, and counts."""

import numpy as np
import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import outlast

rng = np.random.default_rng(4)


class Pictures(Dataset):
    """Items that depend on how many were loaded before, and on the loop's own draws."""

    loaded = 0

    def __len__(self):
        return 50

    def __getitem__(self, index):
        self.loaded += 1
        noise = rng.random() + torch.randn(4)
        return index, torch.full((4,), index / 50 + self.loaded / 100) + noise


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
dataset = Pictures()
loader = DataLoader(dataset, 5, sampler=DistributedSampler(dataset, seed=2))
torch.manual_seed(9 + session.rank)
seen = session.state.setdefault("seen", [])
session.protect(model=model, optimizer=optimizer, loader=loader)


def train_step(batch):
    indices, x = batch
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    seen.append([*indices.tolist(), x.sum().item()])
    session.report(loss=loss.item())
    optimizer.step()


for batch in session.batches(loader, epochs=2):
    session.run(train_step, batch)
write_digests(session, model=model, optimizer=optimizer, seen=seen, rng=rng.random())
