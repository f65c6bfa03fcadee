"""Lottery ticket: the loop prunes by mask and rewinds weights and moments late."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)

model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
initial = {k: v.clone() for k, v in model.state_dict().items()}
masks = {n: torch.ones_like(p) for n, p in model.named_parameters()}
torch.manual_seed(50 + session.rank)

session.protect(model=model, optimizer=optimizer)


def train_step(x):
    optimizer.zero_grad()
    loss = (model(x) - 1).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.mul_(masks[n])
    return loss.item()


for index in session.batches(None, until=10):
    if index == 5:
        for n, p in model.named_parameters():
            masks[n] = (p.detach().abs() > p.detach().abs().median()).float()
        model.load_state_dict(initial)
        optimizer.state.clear()
    session.run(train_step, torch.randn(5, 6))
write_digests(session, model=model, optimizer=optimizer, masks=masks)
