"""The step returns tensors and a dict; the loop sums them up in session.state."""

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

torch.manual_seed(3 + session.rank)
session.state["total"] = 0.0
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    dist.all_reduce(loss.detach_())
    norms = torch.stack([p.grad.norm() for p in model.parameters()])
    optimizer.step()
    return {"loss": loss, "norms": norms}


for index in session.batches(None, until=10):
    result = session.run(train_step, index)
    session.state["total"] += result["loss"].item() + result["norms"].sum().item()
write_digests(session, model=model, optimizer=optimizer, total=session.state["total"])
