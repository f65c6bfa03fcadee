"""A hot spare with two loader processes, a compiled loss and accumulation under no_sync"""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import outlast


class Noisy(Dataset):
    """Samples with noise of the loader's generator."""

    def __len__(self):
        return 160

    def __getitem__(self, index):
        dice = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=dice) + 0.1 * torch.randn(8), index % 4


session = outlast.init(hot_spares=True)
torch.manual_seed(4)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
data = Noisy()
loader = DataLoader(data, 8, sampler=DistributedSampler(data), num_workers=2)
session.protect(model=model, optimizer=optimizer, loader=loader)
cross_entropy = torch.compile(nn.functional.cross_entropy, backend="eager")


def train_step(batch):
    inputs, labels = batch
    optimizer.zero_grad()
    with model.no_sync():
        cross_entropy(model(inputs[:4]), labels[:4]).backward()
    loss = cross_entropy(model(inputs[4:]), labels[4:])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    session.report(loss=loss.item())
    optimizer.step()


for batch in session.batches(loader, epochs=1):
    session.run(train_step, batch)
write_digests(session, model=model, optimizer=optimizer)
