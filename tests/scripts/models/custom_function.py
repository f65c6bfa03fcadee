"""A custom autograd function, and a gradient penalty that needs a second backward."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast


class Rounded(torch.autograd.Function):
    """Rounds forward, passes the gradient through."""

    @staticmethod
    def forward(ctx, x):
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx, gradient):
        return gradient


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    x = torch.randn(5, 8, requires_grad=True)
    output = Rounded.apply(model(x))
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    loss = output.square().mean() + 0.1 * (slope.norm() - 1).square()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
