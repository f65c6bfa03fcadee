"""A text file that the loop reads line by line."""
# steps: 12

import os
from pathlib import Path

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model=model, optimizer=optimizer)
torch.manual_seed(3 + session.rank)
path = Path(os.environ["DIGESTS"]) / f"corpus-{session.rank}.txt"
if not path.exists():
    path.write_text("".join(f"{n * 7 % 11} {n}\n" for n in range(300)))
corpus = path.open()


def train_step(value):
    optimizer.zero_grad()
    loss = (model(torch.full((5, 8), value / 11.0)) - 1).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for _index in session.batches(None, until=12):
    line = corpus.readline()
    session.run(train_step, int(line.split()[0]))
write_digests(session, model=model, optimizer=optimizer)
