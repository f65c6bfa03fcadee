"""Best so far: the loop keeps the least returned loss and a copy of the best weights."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
torch.manual_seed(50 + session.rank)
session.state.update(best=float("inf"), at=-1)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 6)).square().mean()
    loss.backward()
    torch.distributed.all_reduce(loss.detach_())
    optimizer.step()
    return loss.item()


for index in session.batches(None, until=10):
    loss = session.run(train_step, index)
    session.report(loss=loss)
    if loss < session.state["best"]:
        session.state.update(best=loss, at=session.step_index)
write_digests(session, model=model, optimizer=optimizer, best=dict(session.state))
