"""What all sentinels together cost a healthy step: the same job with and without them, in turns.

The physical limit of the comparisons is one pass over the gradients (they must be read to be
judged), which is printed beside the ratio.
"""

from __future__ import annotations

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from harness import OUTLAST, Place, Spread, bootstrap_ratio, load, median, spread, table
from overhead import VARIANTS, Run, Variant, measured
from workload import SIZES, Transformer

WITHOUT = ("--nan=off", "--audit-every=0")
PATIENT = "--limit=hang_floor_s=120"  # each waits for the other's turn
NAME, BAR = "ddp 100ms", 1.01
TURNS = 20


def side_by_side(variant: Variant, turns: int) -> tuple[Run, Run]:
    """Run the job without and with sentinels, taking turns of a few steps."""
    place = Place()
    with tempfile.NamedTemporaryFile() as baton, ThreadPoolExecutor(2) as pool:
        baton.write(bytes(2 * place.ranks))
        baton.flush()
        flags = (
            *("--steps", turns * variant.block, "--block", variant.block, "--small", 100),
            *("--parallel", variant.parallel, "--size", variant.size, "--baton", baton.name),
        )
        bare, full = (
            pool.submit(
                measured,
                (*place.argv(OUTLAST), PATIENT, *switched),
                "outlast_job.py",
                variant,
                (*flags, "--second", second),
            )
            for second, switched in enumerate((WITHOUT, ()))
        )
        return bare.result(), full.result()


def pass_s(variant: Variant) -> Spread:
    """Return the seconds of one pass over the gradients of the variant's model."""
    torch.set_num_threads(1)
    size = SIZES[variant.size]
    model = Transformer(size.width, size.layers)
    gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        for gradient in gradients:
            gradient.sum()
        times.append(time.perf_counter() - begun)
    return spread(times)


def measure(repeats: int) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """Return figures and bars."""
    variant = next(each for each in VARIANTS if each.name == NAME)
    bare: list[list[float]] = []
    full: list[list[float]] = []
    for turn in range(repeats):
        one, other = side_by_side(variant, TURNS)
        bare.append(one.turns_s)
        full.append(other.turns_s)
        sys.stderr.write(f"{turn + 1}/{repeats}\n")
    steps = [[each for run in runs for each in run] for runs in (bare, full)]
    ratio, once = bootstrap_ratio(*steps), pass_s(variant)
    step_s = median(steps[0])
    table(
        ("undisturbed, 4 ranks", "without ms", "with ms", "ratio (95 %)", "one pass, %"),
        [
            (
                NAME,
                f"{1e3 * step_s:.2f}",
                f"{1e3 * median(steps[1]):.2f}",
                f"{ratio.median:.4f} ({ratio.low:.4f} to {ratio.high:.4f})",
                f"{100 * once.median / step_s:.2f}",
            )
        ],
    )
    figures = {"step_s": step_s, "ratio": ratio, "pass_s": once, "load": load()}
    return figures, {"all sentinels, ratio of a step": (ratio.median, BAR)}
