"""The workload as one writes it today: torchrun, DDP, a checkpoint now and then."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from workload import BATCH, BLOCK, Baton, Ledger, Noise, Transformer, die_once, loss_of

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--kill-at", type=int, default=0)
parser.add_argument("--checkpoint-every", type=int, default=0)
parser.add_argument("--small", type=int, default=0, help="small collectives to time at the end")
parser.add_argument("--baton", type=Path, help="take turns with the other job")
args = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
ledger, baton = Ledger(args.folder, rank), Baton(args.baton, 0, rank)
torch.manual_seed(0)
model = DistributedDataParallel(Transformer())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
checkpoint = args.folder / "checkpoint.pt"
done = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    done = saved["step"]

data = Noise()
mine = list(DistributedSampler(data, shuffle=False))
batches = [mine[at : at + BATCH] for at in range(0, args.steps * BATCH, BATCH)]
for words in DataLoader(data, batch_sampler=batches[done:]):
    if done % BLOCK == 0:
        baton.take()
    optimizer.zero_grad()
    loss = loss_of(model, words)
    die_once(args.folder, rank, done + 1, at=args.kill_at)
    loss.backward()
    optimizer.step()
    done += 1
    ledger.add(done)
    if done % BLOCK == 0:
        baton.give()
    if args.checkpoint_every and done % args.checkpoint_every == 0:
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
        dist.barrier()

# What the wire can do: one copy of the state from rank to rank, and one small collective.
size = sum(p.numel() for p in model.parameters()) * 3
state = torch.zeros(size)
baton.take()
dist.barrier()
begin = time.monotonic()
if rank == 0:
    dist.send(state, 1)
elif rank == 1:
    dist.recv(state, 0)
figures = {"copy_s": time.monotonic() - begin, "state_bytes": size * 4}
if args.small:
    one = torch.ones(1)
    dist.barrier()
    begin = time.monotonic()
    for _ in range(args.small):
        dist.all_reduce(one)
    figures["small_s"] = (time.monotonic() - begin) / args.small
if rank == 1:
    (args.folder / "figures.json").write_text(json.dumps(figures))
baton.give()
baton.take()  # until the other job has measured too: our exit would disturb it
dist.destroy_process_group()
