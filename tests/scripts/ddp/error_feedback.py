"""A communication hook that rounds gradients, with error feedback in its closure."""
# steps: 12

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)


def feedback():
    residual = {}

    def hook(state, bucket):
        flat = bucket.buffer()
        kept = residual.get(bucket.index())
        flat = flat + kept if kept is not None else flat
        sent = (flat * 64).round() / 64
        residual[bucket.index()] = flat - sent
        work = dist.all_reduce(sent, async_op=True).get_future()
        return work.then(lambda f: f.value()[0] / dist.get_world_size())

    return hook


model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
model.register_comm_hook(None, feedback())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model=model, optimizer=optimizer)
torch.manual_seed(3 + session.rank)


def train_step(index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=12):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
