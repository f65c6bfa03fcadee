"""A recurrent network that carries its hidden state from batch to batch."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.GRU(4, 8, batch_first=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.state["hidden"] = torch.zeros(1, 3, 8)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    output, hidden = model(torch.randn(3, 5, 4), session.state["hidden"])
    loss = output.square().mean()
    loss.backward()
    session.state["hidden"] = hidden.detach()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer, hidden=session.state["hidden"])
