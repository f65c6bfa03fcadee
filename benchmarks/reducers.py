"""What a DDP's buckets cost at a recovery: its reducer is made again, with recorded buckets.

Every rank does this once when a generation opens, and after each rehearsal. One process: the work
is local. New memory is paid for in the next backward, and counted. In turn with it: a new DDP
around an equal module, as a script could make it (with other bits); and the limit, memory for all
gradients that is written once. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import NamedTuple

import torch
from harness import Clock, clocked, load, spread, table, verdict
from torch import distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from outlast.worker.state.ddp_buckets import DDPBuckets

SECONDS_MAX = 0.2  # of a recovery, for 1e8 parameters
SHAPES = ((2_000, 1_000_000), (200, 100_000_000), (2_000, 100_000_000), (5_000, 100_000_000))


class Layers(nn.Module):
    """`tensors` equal parameters, used in turn."""

    def __init__(self, tensors: int, parameters: int) -> None:
        super().__init__()
        each = parameters // tensors
        self.values = nn.ParameterList(nn.Parameter(torch.zeros(each)) for _ in range(tensors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(value * x).sum() for value in self.values]).sum()


class Turn(NamedTuple):
    """One reducer made again, the backward behind it and one more, one new DDP, one pass over as
    much memory."""

    ours: Clock
    first: Clock
    later: Clock
    wrapped: Clock
    limit: Clock


def measured(tensors: int, parameters: int, repeats: int) -> list[Turn]:
    model, x = DistributedDataParallel(Layers(tensors, parameters)), torch.ones(1)
    other = Layers(tensors, parameters)
    buckets = DDPBuckets(lambda: [model])
    for _ in range(2):  # DDP rebuilds its buckets behind the first backward
        model(x).backward()
        buckets.settle()
        buckets.commit()
    recorded = buckets.states()
    if recorded[0].buckets is None:
        raise SystemExit("this DDP has not rebuilt its buckets: there is nothing to impose")
    turns: list[Turn] = []
    for _ in range(repeats):
        ours = clocked(buckets.restore)
        if buckets.states() != recorded:
            raise SystemExit("the reducer has other buckets than were recorded")
        first, later = (clocked(lambda: model(x).backward()) for _ in range(2))
        wrapped = clocked(partial(DistributedDataParallel, other))
        limit = clocked(partial(torch.ones, parameters))
        turns.append(Turn(ours, first, later, wrapped, limit))
    return turns


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9, help="turns of each shape")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    rows: list[tuple[str, ...]] = []
    figures, bars = {}, {}
    for tensors, parameters in SHAPES:
        turns = measured(tensors, parameters, args.repeats)
        cpu, wall, wrapped, limit = (
            spread([getattr(getattr(turn, way), clock) for turn in turns])
            for way, clock in (
                ("ours", "cpu_s"), ("ours", "wall_s"), ("wrapped", "cpu_s"), ("limit", "cpu_s"),
            )
        )  # fmt: skip
        # The new buckets' memory is touched for the first time in the redone backward.
        redo = spread([turn.first.cpu_s - turn.later.cpu_s for turn in turns])
        ratio = spread([turn.ours.cpu_s / turn.wrapped.cpu_s for turn in turns])
        name = f"{parameters:.0e} in {tensors:,}"
        rows.append(
            (
                name, *(f"{s.median:.3f} ({s.low:.3f} to {s.high:.3f})" for s in (cpu, wall, redo)),
                f"{wrapped.median:.3f}", f"{limit.median:.3f}",
                f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})", f"{load():.1f}",
            )
        )  # fmt: skip
        figures[name] = {
            "cpu_s": cpu, "wall_s": wall, "redo_s": redo, "wrapped_s": wrapped, "limit_s": limit,
            "ratio": ratio, "load": load(),
        }  # fmt: skip
        bars[f"seconds of processor time, {name}"] = (cpu.median, SECONDS_MAX)
    dist.destroy_process_group()
    table(
        ("parameters in tensors", "made again, CPU s", "wall s", "first backward more, CPU s",
         "new DDP, CPU s", "memory, CPU s", "ours / new DDP", "load"),
        rows,
    )  # fmt: skip
    return verdict("reducers", figures, bars)


if __name__ == "__main__":
    sys.exit(main())
