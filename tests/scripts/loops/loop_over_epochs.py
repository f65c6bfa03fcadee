"""A loop over epochs: running loss, evaluation, scheduler, best so far, early stopping."""
# steps: 16

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.Linear(12, 3))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
data = TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, 5, sampler=sampler)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)


def train_step(x, y):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


@torch.no_grad()
def evaluate():
    model.eval()
    x, y = data[session.rank :: session.world_size]
    loss = nn.functional.cross_entropy(model(x), y)
    dist.all_reduce(loss)
    return loss.item()


best, worse, history = float("inf"), 0, []
for epoch in session.epochs(9):
    sampler.set_epoch(epoch)
    model.train()
    running = 0.0
    for index, (x, y) in session.enumerate(loader, start=1):
        session.run(train_step, x + 0.01 * epoch, y)
        running += x.mean().item() * index
    validation = session.run(evaluate) + (2.0 if epoch > 1 else -epoch)
    scheduler.step()
    history.append((epoch, running, validation, scheduler.get_last_lr()))
    worse = 0 if validation < best else worse + 1
    best = min(best, validation)
    if worse == 2:
        break
write_digests(session, model=model, optimizer=optimizer, history=history, best=best)
