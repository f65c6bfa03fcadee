"""A small data-parallel job: its replicas' whole state is compared at every vote."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast

WIDTHS = (16, 32, 32, 4)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    (args.folder / "ledger").touch()  # no rank notes when it commits
    session = outlast.init()
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)]
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(1024, WIDTHS[0]), torch.randint(0, WIDTHS[-1], (1024,)))
    loader = DataLoader(data, 8, sampler=DistributedSampler(data, seed=1))
    session.protect(model=model, optimizer=optimizer, loader=loader)

    def train_step(batch: list[torch.Tensor]) -> float:
        rows, classes = batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(rows), classes)
        loss.backward()
        optimizer.step()
        return loss.item()

    for batch in session.batches(loader, until=args.steps):
        session.report(loss=session.run(train_step, batch))
