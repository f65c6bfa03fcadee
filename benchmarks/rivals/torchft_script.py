"""The plain script under torchft, arranged as its train_ddp.py: a replica group for each rank, its
loader's position saved in each step. `--tuned` changes the lighthouse alone."""

import os
from datetime import timedelta

import torch
from job_parts import BATCH, Record, Words, arguments, loss_of, transformer
from torchdata.stateful_dataloader import StatefulDataLoader
from torchft import (
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)
from torchft.checkpointing.pg_transport import PGTransport

args = arguments()
group = int(os.environ["REPLICA_GROUP_ID"])


def load_state_dict(state_dict):
    model.load_state_dict(state_dict["model"])
    optimizer.load_state_dict(state_dict["optim"])


def state_dict():
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


gloo = ProcessGroupGloo(timeout=timedelta(seconds=5))
manager = Manager(
    pg=gloo,
    min_replica_size=1,
    load_state_dict=load_state_dict,
    state_dict=state_dict,
    replica_id=f"train_ddp_{group}",
    timeout=timedelta(seconds=30),
    checkpoint_transport=PGTransport(gloo, timedelta(seconds=10), torch.device("cpu")),
)
model = DistributedDataParallel(manager, transformer(args))
optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-3))
data = Words(args)
sampler = DistributedSampler(
    data,
    replica_rank=group,
    num_replica_groups=int(os.environ["NUM_REPLICA_GROUPS"]),
    group_rank=0,
    num_replicas=1,
    seed=0,
)
loader = StatefulDataLoader(data, BATCH, sampler=sampler)
record = Record(args)
position = args.folder / f"position.{group}"
epoch = 0
if position.exists():
    saved = torch.load(position, weights_only=True)
    epoch = saved["epoch"]
    sampler.set_epoch(epoch)
    loader.load_state_dict(saved["loader"])


def train_step(words):
    begun = manager.current_step()
    optimizer.zero_grad()
    loss = loss_of(model, words)
    loss.backward()
    optimizer.step()
    return loss, manager.current_step() > begun and manager.is_participating()


while manager.current_step() < args.epochs * args.steps:
    sampler.set_epoch(epoch)
    for words in loader:
        loss, counts = train_step(words)
        if counts:
            record.step(group, manager.current_step(), words, loss)
        new = position.with_suffix(f".{group}.new")
        torch.save({"epoch": epoch, "loader": loader.state_dict()}, new)
        new.replace(position)
        if manager.current_step() >= args.epochs * args.steps:
            break
    epoch += 1

record.end(group, model)
