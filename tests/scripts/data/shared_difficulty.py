"""A curriculum: the collate function reads a number that processes share."""
# refused: changes difficulty (Synchronized)

import multiprocessing

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast

session = outlast.init()
torch.manual_seed(0)

difficulty = multiprocessing.Value("i", 1)


def collate(items):
    return torch.stack([item[0] for item in items]) * difficulty.value


data = TensorDataset(torch.randn(120, 8))
loader = DataLoader(data, 5, sampler=DistributedSampler(data), collate_fn=collate)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model=model, optimizer=optimizer, loader=loader)


def train_step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()
    return loss.item()


torch.manual_seed(3 + session.rank)
for batch in session.batches(loader, until=12):
    loss = session.run(train_step, batch)
    if loss < 3 or session.step_index % 3 == 0:
        difficulty.value += 1
    session.report(difficulty=difficulty.value)
write_digests(session, model=model, optimizer=optimizer, difficulty=difficulty.value)
