"""Mixed precision with a GradScaler that skips a step with infinities."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer, scaler=scaler)


def train_step(index):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(5, 8)).float().square().mean()
    scaler.scale(loss * (float("inf") if index == 4 else 1.0)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    session.report(loss=loss.item())
    scaler.step(optimizer)
    scaler.update()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer, scaler=scaler.state_dict())
