"""Objects: all_gather_object of metrics and broadcast_object_list of a decision."""

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(3 + session.rank)
history = session.state.setdefault("history", [])
session.protect(model=model, optimizer=optimizer)


def train_step(index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    metrics = [None] * session.world_size
    dist.all_gather_object(metrics, {"rank": session.rank, "loss": loss.item()})
    decision = [{"worst": max(m["loss"] for m in metrics)} if session.rank == 0 else None]
    dist.broadcast_object_list(decision)
    history.append(decision[0]["worst"])
    session.report(worst=decision[0]["worst"])
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, history=history)
