"""Outlast's checkpoints in a plain DDP script, under torchrun or any other launcher.

torchrun --standalone --nproc-per-node 2 examples/checkpoint_alone.py --stop-at 30
torchrun --standalone --nproc-per-node 2 examples/checkpoint_alone.py      # goes on from step 20

The second command ends with the same digest as an uninterrupted run in another --root.
"""

import argparse
import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from outlast.checkpoint import Checkpointer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--root", type=Path, default=Path("checkpoints"))
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--save-every", type=int, default=20, help="steps")
parser.add_argument("--stop-at", type=int, default=0, help="exit after this step, as if killed")
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(0)
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
torch.manual_seed(1 + rank)  # each rank draws its own samples

state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train_step() -> float:
    inputs = torch.randn(32, 16)
    optimizer.zero_grad()
    loss = mse_loss(model(inputs), inputs.square().sum(dim=1, keepdim=True))
    loss.backward()
    optimizer.step()
    scheduler.step()
    return loss.item()


# Random generators of every rank and the step are always part of a checkpoint.
with Checkpointer(args.root, job="example", keep="last=2") as checkpoints:
    restored = checkpoints.load(state)
    start = restored.step if restored else 0
    if rank == 0:
        print(f"starts at step {start}", flush=True)
    for step in range(start, args.steps):
        loss = train_step()
        if (step + 1) % args.save_every == 0:
            checkpoints.save(step + 1, state)  # blocks for one copy in memory
            if rank == 0:
                print(f"step {step + 1}: loss {loss:.4f}", flush=True)
        if step + 1 == args.stop_at:
            os._exit(3)  # no clean-up, as after SIGKILL

if rank == 0:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print(f"parameters sha256 {digest.hexdigest()}", flush=True)
