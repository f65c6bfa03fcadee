"""SAM: weights are moved for a second backward, and put back; in a phase with an undo copy."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


@torch.no_grad()
def climb():
    """Return the old weights."""
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    old = [p.clone() for p in model.parameters()]
    for p in model.parameters():
        p.add_(p.grad, alpha=0.05 / norm.item())
    return old


def train_step(_index):
    x = torch.randn(5, 8)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    old = climb()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    with torch.no_grad():
        for p, was in zip(model.parameters(), old, strict=True):
            p.copy_(was)
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run_with_undo(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
