"""Training job: DDP with BatchNorm and dropout, and a shuffled loader."""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import random
import sys
import threading
from pathlib import Path

if sys.argv[-2:] == ["--bug", "import"]:
    raise ImportError("no module named flux_capacitor")

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import outlast

STEPS, EVALUATE_EVERY = 14, 5


class Samples(Dataset):
    """Items with their index and an augmentation from the process's generators."""

    def __len__(self) -> int:
        return 83

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        pause("next")
        return index, torch.full((8,), index / 83) + 0.1 * torch.randn(8) + 0.01 * random.random()


parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--hold", type=Path, help="before step 8, wait until this file is there")
parser.add_argument("--bug", default="", help="what is wrong with this script")
parser.add_argument("--wait", default="", help="PLACE:RANK:STEP:SECONDS,...; rank -1: all of them")
args = parser.parse_args()


def pause(place: str) -> None:
    """Wait as an upload, a rollout or a request does, without progress or computation."""
    for one in filter(None, args.wait.split(",")):
        where, rank, step, seconds = one.split(":")
        if where == place and int(rank) in (-1, session.rank) and session.step_index == int(step):
            if where == "held":  # as a C extension does that never lets go of the interpreter
                ctypes.PyDLL(None).usleep(int(1e6 * float(seconds)))
            threading.Event().wait(float(seconds) if where != "held" else 0)


session = outlast.init()
random.seed(session.rank)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2),
    nn.Linear(32, 5 + (args.bug == "model" and session.rank == 1)),
)  # fmt: skip
if args.bug != "model":
    model = nn.parallel.DistributedDataParallel(model)
torch.manual_seed(1000 + session.rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
data = Samples()
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=3), drop_last=True)
seen: list[int] = []
session.protect(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, seen=seen)
if args.bug == "protect twice":
    session.protect(model=model)
if args.bug == "exit early" and session.rank == 1:
    raise SystemExit(0)
optimizer.register_step_pre_hook(lambda *_: pause("vote"))
if args.bug == "vote" and session.rank == 1:
    votes = session._worker.groups.vote

    def vote(place: str, share: int = 0) -> bool:
        """Replace one vote's answer by an error that no network raises."""
        agreed = votes(place, share)
        if place.startswith("13 "):
            session._worker.groups.vote = votes
            raise ArithmeticError("the sum cannot be read")
        return agreed

    session._worker.groups.vote = vote
name = session.shared("name", lambda: f"run-{random.SystemRandom().getrandbits(40):x}")


def train_step(batch: list[torch.Tensor]) -> float:
    index, x = batch
    if args.bug == "typo" and session.step_index == 6:
        raise KeyError("moedl")
    optimizer.zero_grad()
    pause("forward")
    pause("held")
    for half in range(2):  # two micro-batches, accumulated
        y = nn.functional.log_softmax(model(x[2 * half : 2 * half + 2]), dim=1)
        loss = nn.functional.nll_loss(y, index[2 * half : 2 * half + 2] % 5) / 2
        if half:
            loss.register_hook(lambda _: pause("backward"))
        loss.backward()
        pause("collectives")
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    seen.extend(index.tolist())
    optimizer.step()
    pause("apply")
    if args.bug == "collective after" and session.step_index == 6:
        torch.distributed.all_reduce(x)
    if args.bug == "raise after" and session.step_index == 6 and session.rank == 1:
        raise ValueError("after the step of one rank")
    if args.bug == "random after" and session.step_index == 6:
        torch.rand(1)
    return loss.item()


def evaluate() -> float:
    pause("evaluate")
    with torch.no_grad():
        total = model(torch.linspace(-1, 1, 64).view(8, 8)).sum()
    torch.distributed.all_reduce(total)
    return total.item()


session.state["tail"] = 0
pause("setup")
for batch in session.batches(loader, until=STEPS):
    if args.hold and session.step_index == 7:
        args.hold.with_suffix(f".{session.rank}").touch()
        while not args.hold.exists():
            threading.Event().wait(0.01)
    loss = session.run(train_step, batch)
    session.report(loss=loss)
    scheduler.step()
    session.state["tail"] += 1
    pause("between")
    if args.bug == "collective outside" and session.step_index == 6:
        torch.distributed.all_reduce(torch.ones(1))
    if session.step_index % EVALUATE_EVERY == 0:
        session.state["evaluation"] = session.run(evaluate)

pause("end")
if args.bug == "crash at the end" and session.rank == 1:
    raise OSError("cannot write the final model")
digest = hashlib.sha256()
for tensor in [*model.state_dict().values(), torch.get_rng_state()]:
    digest.update(tensor.numpy().tobytes())
for state in optimizer.state.values():
    digest.update(state["exp_avg_sq"].numpy().tobytes())
digest.update(repr((random.getstate(), scheduler.get_last_lr(), loss)).encode())
result = {"digest": digest.hexdigest(), "seen": seen, "state": session.state, "name": name}
result["step"] = session.step_index
args.out.mkdir(exist_ok=True)
(args.out / f"{session.rank}.json").write_text(json.dumps(result))
