"""The workload as one writes it today: torchrun, DDP, a checkpoint now and then."""

from __future__ import annotations

import argparse
import json
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from workload import (
    SIZES,
    Baton,
    Ledger,
    Noise,
    add_flags,
    device_of,
    die_once,
    loss_of,
    parallel_model,
    wait_for,
)

parser = argparse.ArgumentParser()
add_flags(parser)
parser.add_argument("--checkpoint-every", type=int, default=0)
args = parser.parse_args()

torch.set_num_threads(1)
size = SIZES[args.size]
device = device_of(args.device)
dist.init_process_group("gloo" if args.device == "cpu" else "nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
ledger, baton = Ledger(args.folder), Baton(args.baton, 0, ranks)
model = parallel_model(args.parallel, size, device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
checkpoint = args.folder / "checkpoint.pt"
done = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    done = saved["step"]

data = Noise(size.context)
replicas = 1 if args.parallel == "tp" else ranks
mine = list(DistributedSampler(data, replicas, rank % replicas, shuffle=False))
batches = [mine[at : at + size.batch] for at in range(0, args.steps * size.batch, size.batch)]
for words in DataLoader(data, batch_sampler=batches[done:]):
    if done % args.block == 0:
        baton.take()
    optimizer.zero_grad()
    loss = loss_of(model, words.to(device))
    if done + 1 == args.kill_at:
        die_once(args.folder, rank)
    loss.backward()
    optimizer.step()
    wait_for(device)
    done += 1
    ledger.add(rank, done)
    if done % args.block == 0:
        baton.give(rank)
    if args.checkpoint_every and done % args.checkpoint_every == 0:
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
        dist.barrier()

# What the wire can do: one copy of the state from rank to rank, and one small collective.
numbers = sum(p.numel() for p in model.parameters()) * 3
state = torch.zeros(numbers, device=device)
baton.take()
dist.barrier()
begin = time.monotonic()
if rank == 0:
    dist.send(state, 1)
elif rank == 1:
    dist.recv(state, 0)
wait_for(device)
figures = {"copy_s": time.monotonic() - begin, "state_bytes": numbers * 4}
if args.small:
    one = torch.ones(1, device=device)
    dist.barrier()
    begin = time.monotonic()
    for _ in range(args.small):
        dist.all_reduce(one)
    wait_for(device)
    figures["small_s"] = (time.monotonic() - begin) / args.small
if rank == 1:
    (args.folder / "figures.json").write_text(json.dumps(figures))
baton.give(rank)
baton.take()  # until the other job has measured too: our exit would disturb it
dist.destroy_process_group()
