"""FSDP1: FullyShardedDataParallel, whose flat parameters are no DTensors."""
# ranks: 2
# refused: use fully_shard (FSDP2)

import torch
from digests import write_digests
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 6))
model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(70 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(7, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, weights=[p.detach() for p in model.parameters()], optimizer=optimizer)
