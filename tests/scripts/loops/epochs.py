"""Epochs: a scheduler step and an evaluation with BatchNorm at the end of each one."""
# steps: 12

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
    nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3)
    )
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
data = TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
loader = DataLoader(data, 5, sampler=DistributedSampler(data))
torch.manual_seed(3 + session.rank)
history = session.state.setdefault("history", [])
session.protect(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)


def train_step(batch):
    model.train()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


@torch.no_grad()
def evaluate():
    model.eval()
    x, y = data[session.rank :: session.world_size]
    right = (model(x).argmax(1) == y).sum()
    dist.all_reduce(right)
    return right.item()


for batch in session.batches(loader, epochs=3):
    session.run(train_step, batch)
    if session.step_index % 4 == 0:
        scheduler.step()
        history.append(session.run(evaluate))
write_digests(session, model=model, optimizer=optimizer, history=history)
