"""A script written for torchft. With `--torchft` its imports are torchft's own."""

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path

import torch
from torch import nn, optim
from torch.optim import swa_utils

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--torchft", action="store_true")
parser.add_argument("--die", nargs="*", default=[])  # RANK:PLACE:STEP
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)

if options.torchft:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchft import (
        DistributedDataParallel,
        DistributedSampler,
        Manager,
        Optimizer,
        ProcessGroupGloo,
    )
else:
    from outlast.integrations.torchft_manager import (
        DistributedDataParallel,
        DistributedSampler,
        Manager,
        Optimizer,
        ProcessGroupGloo,
        StatefulDataLoader,
    )

REPLICA_GROUP_ID = int(os.environ.get("REPLICA_GROUP_ID", 0))
NUM_REPLICA_GROUPS = int(os.environ.get("NUM_REPLICA_GROUPS", 2))


def die(place, step):
    mark = f"{REPLICA_GROUP_ID}:{place}:{step}"
    if mark in options.die:
        try:
            (options.out / mark).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1)
        )
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.layers(x)


def make_loader():
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    trainset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    sampler = DistributedSampler(
        trainset,
        replica_rank=REPLICA_GROUP_ID,
        num_replica_groups=NUM_REPLICA_GROUPS,
        group_rank=0,
        num_replicas=1,
        shuffle=True,
        seed=1,
    )
    return StatefulDataLoader(trainset, batch_size=8, sampler=sampler)


def main():
    trainloader = make_loader()

    def load_state_dict(state_dict):
        m.load_state_dict(state_dict["model"])
        optimizer.load_state_dict(state_dict["optim"])

    def state_dict():
        return {"model": m.state_dict(), "optim": optimizer.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=NUM_REPLICA_GROUPS if options.torchft else 1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"job_{REPLICA_GROUP_ID}",
        init_sync=False,
    )
    torch.manual_seed(5)
    m = DistributedDataParallel(manager, Net())
    optimizer = Optimizer(manager, optim.AdamW(m.parameters(), lr=1e-2))
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    average = swa_utils.AveragedModel(m.module, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    if not options.torchft:
        manager.protect(average=average)
    criterion = nn.MSELoss()
    torch.manual_seed(7 + REPLICA_GROUP_ID)
    losses, rates, total = [], [], 0.0

    while manager.current_step() < options.steps:
        for _, (inputs, labels) in enumerate(trainloader):
            step = manager.current_step()
            die("draw", step)
            optimizer.zero_grad()
            out = m(inputs)
            die("forward", step)
            loss = criterion(out, labels)
            loss.backward()
            die("backward", step)
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            optimizer.step()
            if manager.current_step() > step:
                die("step", step)
            scheduler.step()
            average.update_parameters(m.module)
            total += loss.item()
            losses.append(loss.item())
            rates.append(scheduler.get_last_lr()[0])
            mean = torch.tensor([loss.item()])
            if not options.torchft:
                manager.allreduce(mean).wait()
            if manager.current_step() > step:
                die("reduced", step)
            losses.append(mean.item())
            if step % 5 == 0:
                print(f"[{step}] loss = {loss.item()} {mean.item()}")
            if manager.current_step() >= options.steps:
                break
    write(m, average, manager, {"losses": losses, "total": total, "rates": rates})


def digest_of(module):
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def write(m, average, manager, numbers):
    (options.out / f"{REPLICA_GROUP_ID}.json").write_text(
        json.dumps(
            {
                "weights": digest_of(m.module),
                "average": digest_of(average),
                "steps": manager.current_step(),
                "batches": manager.batches_committed(),
                "participants": manager.num_participants(),
                **numbers,
            }
        )
    )
    manager.shutdown()


main()
