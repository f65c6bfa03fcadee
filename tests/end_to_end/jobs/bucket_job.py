"""Many DDP modules whose buckets are built differently, on three ranks, in one step."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--plain", action="store_true", help="under torchrun, without Outlast")
parser.add_argument("--strike", nargs="*", default=[], help="RANK:STEP:HOW, each once")
parser.add_argument("--only", nargs="*", default=[])
parser.add_argument("--raise-dry", action="store_true", help="fail where no other rank answers")
args = parser.parse_args()
STEPS, SMALL = 8, 0.0006  # MB a bucket: one or two of the layers below


class Branches(nn.Module):
    """Two branches with reversed gradient order on odd steps; one may be unused."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.step = kind, 0
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        if kind == "mixed":
            self.c = self.c.to(torch.bfloat16)
        if kind == "sparse":
            self.table = nn.Embedding(5, 8, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.a, self.b
        if self.kind == "varying" and self.step % 2:
            first, second = second, first
        x = second(first(x).relu())
        if self.kind == "sparse":
            x = x + self.table(torch.arange(4) % (2 + self.step % 3))
        if self.kind == "dropped" and self.step % 3 == dist.get_rank() % 2:
            return x
        return self.c(x.to(self.c.weight.dtype)).float()


KINDS: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "static": {"static_graph": True, "bucket_cap_mb": SMALL},
    "varying": {"bucket_cap_mb": SMALL},
    "dropped": {"find_unused_parameters": True, "bucket_cap_mb": SMALL},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": SMALL},
    "accumulated": {"bucket_cap_mb": SMALL},
    "synced twice": {"bucket_cap_mb": SMALL},
    "static twice": {"static_graph": True, "bucket_cap_mb": SMALL},
    "mixed": {"bucket_cap_mb": SMALL},
    "sparse": {"bucket_cap_mb": SMALL},
    "hook": {"bucket_cap_mb": SMALL},
    "built in": {"bucket_cap_mb": SMALL},
    "late": {"bucket_cap_mb": SMALL},
    "frozen": {"find_unused_parameters": True, "bucket_cap_mb": SMALL},
}
kinds = args.only or list(KINDS)

if args.plain:
    dist.init_process_group("gloo")
    rank, session = dist.get_rank(), None
else:
    import outlast

    session = outlast.init()
    rank = session.rank
torch.manual_seed(0)
models = {
    kind: nn.parallel.DistributedDataParallel(Branches(kind), **KINDS[kind]) for kind in kinds
}
if "hook" in models:
    models["hook"].register_comm_hook(None, default_hooks.fp16_compress_hook)
if "built in" in models:
    models["built in"]._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
parameters = [p for kind in kinds for p in models[kind].parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.05)
if session is not None:
    session.protect(models=nn.ModuleDict(models), optimizer=optimizer)


def train(step: int) -> float:
    if args.raise_dry and step == 5 and no_other_answers():
        raise RuntimeError("the sum over the ranks cannot be this rank's own")
    optimizer.zero_grad()
    losses = []
    draw = torch.Generator().manual_seed(100 * step + rank)
    for kind, model in models.items():
        model.module.step = step
        if kind == "late" and step < 3:
            continue
        if kind == "frozen":
            model.module.c.requires_grad_(step % 2 == 0)
        if kind == kinds[len(kinds) // 2]:
            strike(step)  # some have been through their backward, others have not
        times = 2 if kind in ("accumulated", "synced twice", "static twice") else 1
        for time in range(times):
            quiet = kind == "accumulated" and time == 0
            with model.no_sync() if quiet else contextlib.nullcontext():
                loss = model(torch.randn(4, 8, generator=draw)).pow(2).mean()
                loss.backward()
        losses.append(loss)
    optimizer.step()
    return sum(loss.item() for loss in losses)


def strike(step: int) -> None:
    for how in ("kill", "raise"):
        here = f"{rank}:{step}:{how}"
        mark = args.out.with_name(f"struck-{here}")
        if here in args.strike and not mark.exists():
            # All stand here, past the first models' backward, before one is lost.
            mark.touch()
            if how == "raise":
                raise ValueError("struck")
            os.kill(os.getpid(), signal.SIGKILL)


def no_other_answers() -> bool:
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item() == 1


digests: list[dict[str, str]] = []


def look() -> None:
    digests.append(
        {
            kind: hashlib.sha256(
                b"".join(p.detach().float().numpy().tobytes() for p in model.parameters())
            ).hexdigest()[:12]
            for kind, model in models.items()
        }
    )


if session is None:
    for step in range(STEPS):
        train(step)
        look()
else:
    for step in session.batches(None, until=STEPS):
        session.run(train, step)
        look()
args.out.mkdir(exist_ok=True)
told = {"last": digests[-1], "steps": digests, "pid": os.getpid()}
(args.out / f"{rank}.json").write_text(json.dumps(told))
dist.destroy_process_group()
