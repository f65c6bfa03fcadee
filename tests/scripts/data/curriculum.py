"""A curriculum: the last loss decides how hard the next samples are."""

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))

optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
torch.manual_seed(3 + session.rank)
session.state.update(hardness=1, history=[])
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8) * session.state["hardness"]).square().mean()
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    session.state["hardness"] = 1 + (session.state["hardness"] + (total < 0.3).item()) % 4
    session.state["history"].append(session.state["hardness"])
    session.report(loss=total.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer, state=dict(session.state))
