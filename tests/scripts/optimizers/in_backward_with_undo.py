"""Optimizers that step inside backward, in a phase with an undo copy."""

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn

import outlast

session = outlast.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
each = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
named = {f"sgd{n}": optimizer for n, optimizer in enumerate(each.values())}
torch.manual_seed(3 + session.rank)
session.protect(model=model, **named)


def update(parameter):
    dist.all_reduce(parameter.grad)
    each[parameter].step()
    parameter.grad = None


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)


def train_step(_index):
    model(torch.randn(5, 8)).square().mean().backward()


for index in session.batches(None, until=10):
    session.run_with_undo(train_step, index)
write_digests(session, model=model)
