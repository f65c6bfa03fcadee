"""Job that resumes from a checkpoint of its own: `own_checkpoint_job --out=DIR`.

A replacement worker, too, finds the checkpoint at the top. The generator of the batches moves
between two epochs alone, in a comprehension.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()
session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
rng = np.random.default_rng(session.rank)
start, newest = 0, args.out.with_name("newest.pt")
if newest.exists():
    saved = torch.load(newest, weights_only=True)
    model.load_state_dict(saved["model"])
    start = saved["epoch"] + 1
session.protect(model=model, optimizer=optimizer)


def step(batch):
    optimizer.zero_grad()
    loss = model(torch.from_numpy(batch).float()).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


history = []
for epoch in session.epochs(range(start, 4)):
    batches = [rng.standard_normal((3, 4)) for _ in range(3)]
    total = 0.0
    for batch in session.batches(batches):
        total += session.run(step, batch)
    history.append((epoch, total.hex()))
    if session.rank == 0:
        with newest.open("wb") as file:
            torch.save({"model": model.state_dict(), "epoch": epoch}, file)
args.out.mkdir(exist_ok=True)
weights = [parameter.tolist() for parameter in model.parameters()]
(args.out / f"{session.rank}.json").write_text(json.dumps([history, weights]))
