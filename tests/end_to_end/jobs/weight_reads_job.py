"""Code that reads weights between phases: `weight_reads_job --out=DIR --place=PLACE`.

PLACE: `draw` (rank 0 evaluates before each step), `save` (it takes the state), `head` (it evaluates
at each epoch's beginning), `behind` (behind each step). DIR/RANK.json has what it has read last at
each step, and the weights.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path)
parser.add_argument("--place")
args = parser.parse_args()
session = outlast.init()
args.out.mkdir(exist_ok=True)
torch.manual_seed(0)
raw = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
model = DistributedDataParallel(raw)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
session.protect(model=model, optimizer=optimizer)


def train_step(number: int) -> None:
    optimizer.zero_grad()
    (model(torch.full((4, 4), number / 7)) - 1).square().mean().backward()
    optimizer.step()


@torch.no_grad()
def read(place: str, number: int) -> None:
    """Write what the weights give into a file of this step, also where it is written again."""
    if args.place == place and session.rank == 0:
        value = raw(torch.ones(1, 4)).item() if place != "save" else _sum(raw.state_dict())
        (args.out / f"read.{number}").write_text(value.hex())


def _sum(state: dict[str, torch.Tensor]) -> float:
    return sum(value.sum().item() for value in state.values())


if args.place == "head":
    for epoch in session.epochs(3):
        read("head", epoch)
        for number in session.batches(range(4)):
            session.run(train_step, number)
else:
    for number in session.batches(None, until=12):
        read("draw", number)
        read("save", number)
        session.run(train_step, number)
        read("behind", number)
found = {path.name: path.read_text() for path in args.out.glob("read.*") if session.rank == 0}
weights = [parameter.tolist() for parameter in raw.parameters()]
(args.out / f"{session.rank}.json").write_text(json.dumps([found, weights]))
