"""A validation loader with a process that stays, read inside phases that evaluate."""
# refused: with persistent_workers=True, whose processes persist

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import outlast


class Pictures(Dataset):
    """Items with an augmentation that is drawn when they are loaded."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((4,), index / 50) + torch.randn(4)


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(Pictures(), 4, shuffle=True, num_workers=1)
validation = DataLoader(Pictures(), 20, num_workers=1, persistent_workers=True)
torch.manual_seed(9 + session.rank)
seen = session.state.setdefault("seen", [])
session.protect(model=model, optimizer=optimizer, loader=loader)


def train_step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


def evaluate():
    with torch.no_grad():
        return sum(model(x).sum().item() for x in validation)


for x in session.batches(loader, until=10):
    session.run(train_step, x)
    if session.step_index % 2 == 0:
        seen.append(session.run(evaluate))
write_digests(session, model=model, optimizer=optimizer, seen=seen)
