"""A script of torchrun that keeps its own first lines: `early_group_job --out=DIR [--plain]`.

It reads RANK, makes the process group and builds its model above `outlast.init()`, and destroys the
group at its end. --plain: without a session. DIR/RANK.json has the digest of the weights.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path

import torch
from torch import nn
from torch.distributed import destroy_process_group, get_rank, init_process_group
from torch.nn.parallel import DistributedDataParallel

import outlast

is_distributed = int(os.environ.get("RANK", -1)) != -1
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path)
parser.add_argument("--plain", action="store_true")
args = parser.parse_args()
assert is_distributed
rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
init_process_group(backend="gloo", world_size=int(os.environ["WORLD_SIZE"]), rank=rank)
assert (get_rank(), local_rank) == (rank, rank)

torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(1 + rank)


def train_step(step: int) -> float:
    optimizer.zero_grad()
    loss = (model(torch.full((4, 8), step / 10)) - 1).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


losses = []
if args.plain:
    losses = [train_step(step).hex() for step in range(12)]
else:
    session = outlast.init()
    session.protect(model=model, optimizer=optimizer)
    for step in session.batches(None, until=12):
        losses.append(session.run(train_step, step).hex())
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
args.out.mkdir(exist_ok=True)
(args.out / f"{rank}.json").write_text(json.dumps([digest.hexdigest(), losses]))
destroy_process_group()
