"""A script that starts processes itself: `own_processes_job --do=DEED --out=DIR`."""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import outlast

parser = argparse.ArgumentParser()
parser.add_argument("--do", default="")
parser.add_argument("--out", type=Path)
args = parser.parse_args()
deed = args.do


def join(pid: int) -> None:
    os.waitpid(pid, 0)


def spawned_main(_index: int) -> None:
    outlast.init()


if __name__ == "__main__":
    if deed == "spawn":
        spawn(spawned_main, nprocs=2)
    if deed == "fork above init":
        os.fork()
    if deed == "subprocess":
        subprocess.run([sys.executable, __file__, "--do", ""], check=True)
    session = outlast.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(session.rank)

    def train(step: int) -> float:
        optimizer.zero_grad()
        loss = (model(torch.full((4, 4), step / 10)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def train_alone() -> None:
        model.module(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    deeds: dict[str, Any] = {
        "init in a child": outlast.init,
        "run in a child": lambda: session.run(train, 1),
        "state in a child": lambda: session.state.update(a=1),
        "train in a child": train_alone,
        "reduce in a child": lambda: dist.all_reduce(torch.ones(1)),
        "rank in a child": lambda: print(f"child of {session.rank} of {session.world_size}"),
    }
    session.protect(model=model, optimizer=optimizer)
    if deed in deeds:
        child = multiprocessing.get_context("fork").Process(target=deeds[deed])
        child.start()
        child.join()
        print(f"child has ended with {child.exitcode}", flush=True)

    def train_beside_children(step: int) -> float:
        if (child := os.fork()) == 0:
            os._exit(0)
        join(child)
        if (child := os.fork()) == 0:
            sys.exit(0)  # with the handlers of this process's end
        join(child)
        if (child := os.fork()) == 0:
            return 0.0  # and would go on as the rank
        join(child)
        return train(step)

    def train_shared_weights(step: int) -> None:
        model.module.share_memory()
        if (child := os.fork()) == 0:
            with torch.no_grad():
                for parameter in model.module.parameters():
                    parameter += 0.01
            os._exit(0)
        join(child)
        train(step)

    steps = {"fork": train_beside_children, "train shared weights": train_shared_weights}
    for step in session.batches(None, until=8):
        session.run(steps.get(deed, train), step)
    values = [parameter.tolist() for parameter in model.parameters()]
    args.out.mkdir(exist_ok=True)
    (args.out / f"{session.rank}.json").write_text(json.dumps(values))
