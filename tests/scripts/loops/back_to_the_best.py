"""Back to the best: weights that were kept are loaded again when the loss rises."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(6, 3))
best = nn.Linear(6, 3)
best.load_state_dict(model.module.state_dict())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
torch.manual_seed(50 + session.rank)
session.state.update(least=float("inf"), returns=0)
session.protect(model=model, best=best, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = (model(torch.randn(4, 6)) - 1).square().mean()
    loss.backward()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    session.report(loss=total.item())
    optimizer.step()
    return total.item()


for index in session.batches(None, until=10):
    loss = session.run(train_step, index)
    if loss < session.state["least"]:
        session.state["least"] = loss
        best.load_state_dict(model.module.state_dict())
    elif loss > 1.2 * session.state["least"]:
        session.state["returns"] += 1
        model.module.load_state_dict(best.state_dict())
write_digests(session, model=model, best=best, state=dict(session.state))
