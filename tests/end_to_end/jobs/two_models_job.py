"""Two networks with a DDP each, stepped in turn by two phase functions, as a GAN."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path

import torch
from torch import nn

import outlast

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--die", nargs="*", default=[], help="FUNCTION:INDEX, where rank 1 dies once")
args = parser.parse_args()

session = outlast.init()
torch.manual_seed(0)
wrap = nn.parallel.DistributedDataParallel
maker = wrap(nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 8)))
judge = wrap(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)))
torch.manual_seed(100 + session.rank)
maker_steps = torch.optim.AdamW(maker.parameters(), lr=1e-2)
judge_steps = torch.optim.AdamW(judge.parameters(), lr=1e-2)
session.protect(maker=maker, judge=judge, maker_steps=maker_steps, judge_steps=judge_steps)


def die_once(function: str, index: int) -> None:
    here = f"{function}:{index}"
    mark = args.out.with_name(f"died-{function}")
    if session.rank == 1 and here in args.die and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def teach_judge(index: int) -> float:
    true, false = torch.randn(4, 8) + index, maker(torch.randn(4, 4)).detach()
    loss = nn.functional.softplus(-judge(true)).mean() + nn.functional.softplus(judge(false)).mean()
    judge_steps.zero_grad()
    loss.backward()
    die_once("judge", index)
    judge_steps.step()
    return loss.item()


def teach_maker(index: int) -> float:
    loss = nn.functional.softplus(-judge(maker(torch.randn(4, 4)))).mean()
    judge_steps.zero_grad()
    maker_steps.zero_grad()
    loss.backward()
    die_once("maker", index)
    maker_steps.step()
    judge_steps.zero_grad()
    return loss.item()


for index in session.batches(None, until=12):
    session.run(teach_judge, index)
    session.run(teach_maker, index)

digest = hashlib.sha256()
for tensor in [*maker.state_dict().values(), *judge.state_dict().values(), torch.get_rng_state()]:
    digest.update(tensor.numpy().tobytes())
args.out.mkdir(exist_ok=True)
(args.out / f"{session.rank}.json").write_text(json.dumps({"digest": digest.hexdigest()}))
