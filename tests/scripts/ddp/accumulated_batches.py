"""Gradient accumulation over drawn batches: three make a step, one behind each epoch's end."""
# steps: 12

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
data = TensorDataset(torch.randn(112, 8), torch.randint(4, (112,)))
sampler = DistributedSampler(data, seed=3)
loader = DataLoader(data, batch_size=8, sampler=sampler)
torch.manual_seed(100 + session.rank)
seen = []
session.protect(model=model, optimizer=optimizer)


def train_step(batches):
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y) / 3
        loss.backward()
        seen.extend(y.tolist())
    optimizer.step()
    optimizer.zero_grad()


for epoch in session.epochs(4):
    sampler.set_epoch(epoch)
    for _, batches in session.enumerate(loader, batches_per_step=3):
        session.run(train_step, batches)
write_digests(session, model=model, optimizer=optimizer, seen=seen)
