"""Blocks of steps with and without sentinels in turn, in one run, for `sentinel_cost.py`.

Every rank switches at the same steps, so that votes stay equal. No block has a switch in it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from torch.utils.data import DataLoader, DistributedSampler
from workload import SIZES, Ledger, Noise, add_flags, device_of, loss_of, parallel_model

import outlast
from outlast.launch.outlast_flags import AUDIT_EVERY

parser = argparse.ArgumentParser()
add_flags(parser)
args = parser.parse_args()

torch.set_num_threads(1)
size = SIZES[args.size]
session = outlast.init()
device = device_of(args.device)
model = parallel_model(args.parallel, size, device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = Noise(size.context)
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, size.batch, sampler=sampler)
session.protect(model=model, optimizer=optimizer, loader=loader)
worker: Any = session._worker  # noqa: SLF001 - no user switches sentinels inside a run
settings = worker._settings  # noqa: SLF001 - likewise


def switch(*, on: bool) -> None:
    """Switch the look at gradients, its hook, and the windows in votes."""
    phases = worker.phases
    phases.nonfinite.configure(replace(settings, nan="" if on else "off"), lambda: None)
    phases.nonfinite.watch(phases.protected, device)
    worker.auditor.every = AUDIT_EVERY if on else 0


def clocked(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call with its processor time counted."""

    def counted(*values: Any) -> Any:
        entered = time.thread_time()
        try:
            return call(*values)
        finally:
            calls_s[0] += time.thread_time() - entered

    return counted


calls_s = [0.0]
worker.phases.nonfinite.look = clocked(worker.phases.nonfinite.look)
worker.phases.before_vote = clocked(worker.phases.before_vote)


def train_step(words: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, words.to(device)).backward()
    optimizer.step()


ledger = Ledger(args.folder)
blocks: list[tuple[bool, float, float, float]] = []
begun = (0.0, 0.0)
for words in session.batches(loader, until=args.steps):
    step = session.step_index
    if step % args.block == 0:
        if step:
            took = time.process_time() - begun[0], time.perf_counter() - begun[1]
            blocks.append(((step // args.block) % 2 == 0, *took, calls_s[0]))
        switch(on=(step // args.block) % 2 == 1)
        calls_s[0] = 0.0
        begun = time.process_time(), time.perf_counter()
    session.run(train_step, words)
ledger.add(session.rank, session.step_index)
(args.folder / f"blocks-{session.rank}.json").write_text(json.dumps(blocks))
