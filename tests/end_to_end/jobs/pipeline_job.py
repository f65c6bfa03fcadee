"""A pipeline of two ranks without replicas: two stages a rank, interleaved, with one optimizer."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import outlast

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()

session = outlast.init()
torch.manual_seed(session.rank)
blocks = nn.ModuleList(
    nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8)) for _ in range(2)
)
stages: list[Any] = [
    PipelineStage(block, session.rank + 2 * turn, 4, torch.device("cpu"))
    for turn, block in enumerate(blocks)
]
schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5 if session.rank else 0.25)
torch.manual_seed(70 + session.rank)
session.protect(schedule=schedule, optimizer=optimizer, scheduler=scheduler)


def train_step(_index: int) -> None:
    optimizer.zero_grad()
    given, target = torch.randn(8, 8), torch.randn(8, 8)
    losses: list[torch.Tensor] = []
    if session.rank == 0:
        schedule.step(given)
    else:
        schedule.step(target=target, losses=losses)
        session.report(loss=sum(loss.item() for loss in losses))
    optimizer.step()
    scheduler.step()


for index in session.batches(None, until=12):
    session.run(train_step, index)


def digest_of(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


ended = {"random": torch.get_rng_state(), **blocks.state_dict()}
for name, parameter in blocks.named_parameters():
    ended |= {f"{name} {key}": value for key, value in optimizer.state[parameter].items()}
digests = {name: digest_of(ended[name]) for name in sorted(ended)}
digests["rate"] = repr(optimizer.param_groups[0]["lr"])
args.out.mkdir(exist_ok=True)
(args.out / f"{session.rank}.json").write_text(json.dumps(digests))
