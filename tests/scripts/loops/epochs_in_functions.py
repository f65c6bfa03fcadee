"""Epochs in functions: meters, an evaluation before each, the sampler's epoch set behind it."""
# steps: 12

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast


class AverageMeter:
    sum, count = 0.0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n


def train_epoch(epoch, loader, step):
    losses = AverageMeter()
    model.train()
    for index, batch in session.enumerate(loader):
        losses.update(batch[0].mean().item(), n=epoch + index)
        session.run(step, batch)
    return losses.sum / losses.count


@torch.no_grad()
def validate(x, y):
    model.eval()
    loss = nn.functional.cross_entropy(model(x), y)
    dist.all_reduce(loss)
    return loss.item()


def main():
    sampler = DistributedSampler(data, seed=7)
    loader = DataLoader(data, 5, sampler=sampler)
    session.protect(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

    def train_step(batch):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()

    best, log = {"epoch": -1, "loss": 1e9}, []
    for epoch in session.epochs(range(2, 5)):
        log += [session.run(validate, *data[session.rank :: 4])]
        log += [train_epoch(epoch, loader, train_step), torch.rand(1).item()]
        after = session.run(validate, *data[session.rank :: 3])
        scheduler.step(after)
        best = {"epoch": epoch, "loss": after} if after < best["loss"] else best
        sampler.set_epoch(epoch * 3)
    return best, log


session = outlast.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.Linear(12, 3))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
data = TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
torch.manual_seed(3 + session.rank)
best, log = main()
write_digests(session, model=model, optimizer=optimizer, best=best, log=log)
