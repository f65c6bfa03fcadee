"""A sampler draws by losses that the loop writes into it."""

import numpy as np
import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

import outlast

session = outlast.init()
torch.manual_seed(0)


class Numbers(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        return i, torch.full((6,), i / 24.0)


class Hard(Sampler):
    def __init__(self, n, seed):
        self.weights = np.ones(n)
        self.generator = np.random.default_rng(seed)
        self.n = n

    def __len__(self):
        return self.n

    def __iter__(self):
        for _ in range(self.n):
            yield int(self.generator.choice(self.n, p=self.weights / self.weights.sum()))


sampler = Hard(24, session.rank)
loader = DataLoader(Numbers(), batch_size=4, sampler=sampler)
model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
torch.manual_seed(50 + session.rank)

session.protect(model=model, optimizer=optimizer, loader=loader)


def train_step(batch):
    index, x = batch
    optimizer.zero_grad()
    losses = (model(x) - 1).square().mean(1)
    losses.mean().backward()
    optimizer.step()
    return index.tolist(), losses.detach().tolist()


for batch in session.batches(loader, until=10):
    index, losses = session.run(train_step, batch)
    for i, loss in zip(index, losses, strict=True):
        sampler.weights[i] = 0.1 + loss
    session.report(loss=sum(losses))
write_digests(session, model=model, optimizer=optimizer, weights=sampler.weights)
