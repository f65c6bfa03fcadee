"""Job whose data, model or optimizer may give numbers that are not finite."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import outlast

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--bad", default="", help="indices of samples with a NaN, as 3,17")
parser.add_argument("--scaler", action="store_true")
parser.add_argument("--own-step", action="store_true", help="an optimizer with a step of its own")
parser.add_argument("--undo", action="store_true", help="two steps in each phase, with undo")
parser.add_argument("--frozen", action="store_true", help="the first layer is not trained")
parser.add_argument("--inside", action="store_true", help="report the loss in the phase")
parser.add_argument("--spot", action="store_true", help="NaN in one gradient, behind reduction")
parser.add_argument("--strict", action="store_true", help="clip, and raise if it is not finite")
parser.add_argument("--quit", action="store_true", help="exit if the loss is not finite")
args = parser.parse_args()
BAD = {int(one) for one in args.bad.split(",") if one}


class Samples(Dataset):
    """Rows of numbers; some have a NaN."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        row = torch.full((8,), index / 64.0)
        if index in BAD:
            row[3] = math.nan
        return index, row


class Careful(torch.optim.SGD):
    """Optimizer that leaves out what is not finite."""

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        super().step(closure)


session = outlast.init()
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))
if args.frozen:
    layers[0].requires_grad_(False)
model = nn.parallel.DistributedDataParallel(layers)
torch.manual_seed(100 + session.rank)
kind = Careful if args.own_step else torch.optim.AdamW
optimizer = kind(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", enabled=args.scaler, init_scale=3.3e38)
data = Samples()
loader = DataLoader(
    data, batch_size=4, sampler=DistributedSampler(data, shuffle=False), drop_last=True
)
losses: list[float] = []
norms: list[float] = []
lists = {"losses": losses, "norms": norms}
session.protect(model=model, optimizer=optimizer, scaler=scaler, loader=loader, **lists)


def train_step(batch: list[torch.Tensor]) -> float:
    index, x = batch
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), index % 4)
    if args.inside:
        session.report(loss=loss)
    if args.quit and not math.isfinite(loss.item()):
        sys.exit(1)
    scaler.scale(50 * loss if args.scaler else loss).backward()  # 50 times the scale is infinite
    marker = args.out.with_suffix(f".{session.rank}")
    if args.spot and session.step_index == 5 and not marker.exists():
        marker.touch()
        next(p for p in reversed([*model.parameters()]) if p.requires_grad).grad[-1] = math.nan
    if args.strict:
        nn.utils.clip_grad_norm_(model.parameters(), 1e6, error_if_nonfinite=True)
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < scale:
        session.state["skips"] = session.state.get("skips", 0) + 1
    return loss.item()


def train_twice(batch: list[torch.Tensor]) -> float:
    train_step(batch)
    return train_step(batch)


run, phase = session.run, train_step
if args.undo:
    run, phase = session.run_with_undo, train_twice
for batch in session.batches(loader, until=args.steps):
    losses.append(run(phase, batch))
    if not args.inside:
        session.report(loss=losses[-1])
    norms.append(sum(float(p.detach().norm()) for p in model.parameters()))

weights, digest = hashlib.sha256(), hashlib.sha256(torch.get_rng_state().numpy().tobytes())
for tensor in model.state_dict().values():
    weights.update(tensor.numpy().tobytes())
for state in optimizer.state.values():
    digest.update(state["exp_avg_sq"].numpy().tobytes() if "exp_avg_sq" in state else b"")
result = {"digest": digest.hexdigest(), "weights": weights.hexdigest(), "norms": norms}
result |= {"losses": [repr(one) for one in losses], "skips": session.state.get("skips", 0)}
args.out.mkdir(exist_ok=True)
(args.out / f"{session.rank}.json").write_text(json.dumps(result))
