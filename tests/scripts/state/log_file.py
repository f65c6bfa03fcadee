"""Files: each rank appends a line between phases, rank 0 saves the model now and then."""

import os
from pathlib import Path

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)
folder = Path(os.environ["DIGESTS"])


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
    with (folder / f"log-{session.rank}.txt").open("a") as log:
        log.write(f"step {session.step_index}\n")
    if session.rank == 0 and session.step_index % 5 == 0:
        torch.save(model.module.state_dict(), folder / "model.pt")
lines = (folder / f"log-{session.rank}.txt").read_text().splitlines()
write_digests(session, model=model, optimizer=optimizer, lines=sorted(set(lines)))
