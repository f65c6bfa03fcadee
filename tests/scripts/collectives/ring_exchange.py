"""Point to point: activations travel a ring by isend and irecv inside the step."""
# ranks: 3

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
session.protect(model=model, optimizer=optimizer)
after = (session.rank + 1) % session.world_size
before = (session.rank - 1) % session.world_size


def train_step(_index):
    optimizer.zero_grad()
    x, from_before = torch.randn(5, 8), torch.empty(5, 8)
    works = [dist.isend(x, after), dist.irecv(from_before, before)]
    for work in works:
        work.wait()
    loss = model(from_before).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
