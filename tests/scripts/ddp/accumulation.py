"""Gradient accumulation: four micro-batches a step, three of them under no_sync."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(96, 8), torch.randint(4, (96,)))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=3), drop_last=True)
torch.manual_seed(100 + session.rank)
seen = []
session.protect(model=model, optimizer=optimizer, loader=loader, seen=seen)


def train_step(batch):
    optimizer.zero_grad()
    total = 0.0
    for index, (x, y) in enumerate(zip(batch[0].chunk(4), batch[1].chunk(4), strict=True)):
        model.require_backward_grad_sync = index == 3
        loss = nn.functional.cross_entropy(model(x), y) / 4
        loss.backward()
        total += loss.item()
    seen.extend(batch[1].tolist())
    session.report(loss=total)
    optimizer.step()


for batch in session.batches(loader, until=10):
    session.run(train_step, batch)
write_digests(session, model=model, optimizer=optimizer, seen=seen)
