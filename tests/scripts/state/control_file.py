"""Control file: the top writes a rate, which each step reads and the loop lowers now and then."""

import json
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

control = Path(os.environ["DIGESTS"]) / f"control-{session.rank}.json"
control.write_text(json.dumps({"rate": 0.1, "lowered": 0}))
log = (Path(os.environ["DIGESTS"]) / f"rates-{session.rank}.txt").open("w")
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    rate = json.loads(control.read_text())["rate"]
    optimizer.zero_grad()
    loss = rate * model(torch.randn(5, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item(), rate=rate)
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
    log.write(f"{session.step_index}\n")
    log.flush()
    if session.step_index % 2 == 0:
        now = json.loads(control.read_text())
        if now["lowered"] < session.step_index:  # once a step, also in a worker that joins late
            now = {"rate": 0.7 * now["rate"], "lowered": session.step_index}
            control.write_text(json.dumps(now))
lines = Path(log.name).read_text().splitlines()
write_digests(
    session,
    model=model,
    optimizer=optimizer,
    control=control.read_text(),
    steps_logged=sorted(set(map(int, lines))),
)
