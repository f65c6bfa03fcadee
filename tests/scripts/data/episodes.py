"""Few-shot episodes that are drawn when they are asked for, by three loader processes ahead."""

import random

import numpy as np
import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, get_worker_info

import outlast


class Episodes:
    """Batches of indices, drawn one by one from the process's generators."""

    def __len__(self):
        return 5

    def __iter__(self):
        for _ in range(5):
            yield [*torch.randperm(40)[:4].tolist(), random.randrange(40)]


class Pictures(Dataset):
    """Each process makes its generator with its first item, from its own seed."""

    rng = None
    loaded = 0

    def __getitem__(self, index):
        if self.rng is None:
            self.rng = np.random.default_rng(get_worker_info().seed)
        self.loaded += 1
        noise = self.rng.random() + random.random() + float(np.random.rand())
        return index, torch.full((4,), index / 50 + self.loaded / 100 + noise)


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(Pictures(), batch_sampler=Episodes(), num_workers=3, persistent_workers=True)
torch.manual_seed(9 + session.rank)
random.seed(session.rank)
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
write_digests(session, model=model, optimizer=optimizer, seen=seen, python=random.getstate())
