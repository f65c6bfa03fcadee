"""Gradients by torch.autograd.grad, reduced and copied into the .grad tensors that are there."""

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn

import outlast

session = outlast.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
parameters = list(model.parameters())
optimizer = torch.optim.AdamW(parameters, lr=1e-2)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    loss = model(torch.randn(5, 8)).square().mean()
    for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        dist.all_reduce(gradient)
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.copy_(gradient / session.world_size)
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
