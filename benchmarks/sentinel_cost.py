"""What all sentinels together cost a healthy step: blocks of steps with and without them, in turn.

Both kinds of blocks are of one run, beside the same load. Processor time is that of all threads of
a rank, and counts on a machine with other work to do; that of the look and of the vote's comparison
is also counted by itself, which has less noise. Time on the wall means something where each
rank has a processor. The physical limit of the comparisons is one pass over the gradients (they
must be read to be judged), which is printed beside the ratios.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from harness import OUTLAST, Place, Spread, bootstrap_ratio, job, load, median, spread, table
from workload import SIZES, Transformer

SIZE, BAR = "100ms", 1.01
BLOCK, PAIRS = 5, 30  # steps of a block; pairs of a repeat
RANKS = (2, 4)


class Pair(NamedTuple):
    """A block without sentinels, and the one with them behind it, in seconds a step."""

    off_cpu_s: float
    on_cpu_s: float
    off_wall_s: float
    on_wall_s: float
    calls_s: float  # in the look and the comparison, more with them than without


def measured(ranks: int) -> list[Pair]:
    """Run one job; return its pairs, each the mean of all ranks, without the first one."""
    flags = ("--steps", 2 * PAIRS * BLOCK + 2 * BLOCK + 1, "--block", BLOCK, "--size", SIZE)
    with job(Place(ranks=ranks).argv(OUTLAST), "sentinel_job.py", *flags) as done:
        files = [done.folder / f"blocks-{rank}.json" for rank in range(ranks)]
        blocks = [json.loads(path.read_text()) for path in files]
    means = [
        (one[0][0], *(sum(each[at] for each in one) / ranks for at in (1, 2, 3)))
        for one in zip(*blocks, strict=True)
    ]
    return [
        Pair(*(each / BLOCK for each in (off[1], on[1], off[2], on[2], on[3] - off[3])))
        for off, on in list(pairwise(means))[2:]
        if on[0]
    ]


def pass_s() -> Spread:
    """Return the seconds of one pass over the gradients of the model."""
    torch.set_num_threads(1)
    size = SIZES[SIZE]
    model = Transformer(size.width, size.layers)
    gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
    times = []
    for _ in range(20):
        begun = time.thread_time()
        for gradient in gradients:
            gradient.sum()
        times.append(time.thread_time() - begun)
    return spread(times)


def measure(repeats: int) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """Return figures and bars."""
    figures: dict[str, Any] = {"load": load()}
    bars: dict[str, tuple[float, float]] = {}
    rows = []
    for ranks in RANKS:
        pairs: list[Pair] = []
        for turn in range(repeats):
            pairs += measured(ranks)
            sys.stderr.write(f"{ranks} ranks: {turn + 1}/{repeats}\n")
        cpu = bootstrap_ratio([p.off_cpu_s for p in pairs], [p.on_cpu_s for p in pairs])
        wall = bootstrap_ratio([p.off_wall_s for p in pairs], [p.on_wall_s for p in pairs])
        added = spread([p.on_cpu_s - p.off_cpu_s for p in pairs])
        calls = spread([p.calls_s for p in pairs])
        step_s = median([p.off_cpu_s for p in pairs])
        both = added, calls
        rows.append(
            (
                f"{ranks}",
                f"{1e3 * step_s:.1f}",
                *(f"{1e3 * s.median:.2f} ({1e3 * s.low:.2f} to {1e3 * s.high:.2f})" for s in both),
                *(f"{r.median:.4f} ({r.low:.4f} to {r.high:.4f})" for r in (cpu, wall)),
                f"{1e3 * median([p.off_wall_s for p in pairs]):.1f}",
            )
        )
        spreads = {"cpu": cpu, "wall": wall, "added_s": added, "calls_s": calls}
        figures[f"{ranks} ranks"] = {**spreads, "step_s": step_s}
        bars[f"all sentinels, processor time of a step, {ranks} ranks"] = (cpu.median, BAR)
        figures["load"] = max(figures["load"], load())
    once = pass_s()
    figures["pass_s"] = once
    times = ("processor ms", "added ms", "in calls ms")
    head = ("ranks", *times, "ratio, processor (95 %)", "ratio, wall", "wall ms")
    table(head, rows)
    print(f"one pass over the gradients: {1e3 * once.median:.2f} ms; load {figures['load']:.1f}")
    return figures, bars
