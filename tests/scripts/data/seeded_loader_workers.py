"""Loader processes seeded by the usual worker_init_fn and a generator."""
# steps: 10

import random

import numpy as np
import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import outlast


class Pictures(Dataset):
    """Items with an augmentation that is drawn when they are loaded."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return index, torch.full((4,), index / 50) + random.random() + float(np.random.rand())


def seed_worker(_worker):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
dataset = Pictures()
loader = DataLoader(
    dataset,
    5,
    sampler=DistributedSampler(dataset, seed=2),
    num_workers=2,
    worker_init_fn=seed_worker,
    generator=torch.Generator().manual_seed(session.rank),
)
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
write_digests(session, model=model, optimizer=optimizer, seen=seen)
