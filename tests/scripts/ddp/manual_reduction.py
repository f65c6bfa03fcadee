"""No DDP: gradients are flattened and reduced by hand, with overlapping works."""

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn

import outlast

session = outlast.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
    for work, parameter in zip(works, model.parameters(), strict=True):
        work.wait()
        parameter.grad /= session.world_size
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
