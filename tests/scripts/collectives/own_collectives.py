"""Own collectives: the loss is reduced and predictions are gathered before the step."""

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(3 + session.rank)
history = session.state.setdefault("history", [])
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    output = model(torch.randn(5, 8))
    loss = output.square().mean()
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, dist.ReduceOp.SUM)
    everybody = [torch.empty(5, 4) for _ in range(session.world_size)]
    dist.all_gather(everybody, output.detach())
    history.append(torch.cat(everybody).abs().sum().item())
    session.report(loss=total.item() / session.world_size)
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer, history=history)
