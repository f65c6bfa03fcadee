"""What an undisturbed run pays: steps, one small collective, and the import.

The plain job under torchrun and the same job under Outlast take turns of a few steps: see
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from harness import (
    OUTLAST,
    TORCHRUN,
    Place,
    Spread,
    bootstrap_ratio,
    job,
    load,
    median,
    table,
    verdict,
)


class Variant(NamedTuple):
    """A job: how the model is divided, its size, steps of a turn, and the bar of its ratio."""

    parallel: str
    size: str
    block: int
    bar: float | None = None

    @property
    def name(self) -> str:
        return f"{self.parallel} {self.size}"


VARIANTS = (
    Variant("ddp", "400ms", 5),
    Variant("ddp", "100ms", 10, bar=1.02),
    Variant("ddp", "10ms", 40),
    Variant("ddp", "1ms", 100),
    Variant("compiled", "100ms", 10),
    Variant("fsdp", "sharded", 4, bar=1.03),
    Variant("tp", "100ms", 10),
)
CPU = Place()
TURNS_MAX = 255  # what a byte of the baton counts
SMALL_BAR = 1.1
IMPORT = """
import time, torch, torch.distributed
begin = time.perf_counter()
import outlast
outlast.init
print(time.perf_counter() - begin)
"""


class Run(NamedTuple):
    """Median step of each turn, and one small collective, in seconds."""

    turns_s: list[float]
    small_s: float


def side_by_side(variant: Variant, turns: int, small: int, place: Place = CPU) -> tuple[Run, Run]:
    """Run the plain job and Outlast's, taking turns of a few steps on the same machine."""
    with tempfile.NamedTemporaryFile() as baton, ThreadPoolExecutor(2) as pool:
        baton.write(bytes(2 * place.ranks))
        baton.flush()
        flags = (
            *("--steps", turns * variant.block, "--block", variant.block, "--small", small),
            *("--parallel", variant.parallel, "--size", variant.size, "--baton", baton.name),
            *("--device", place.device),
        )
        patient = (
            *place.argv(OUTLAST),
            "--limit=hang_floor_s=120",
        )  # it waits for the other's turn
        plain = pool.submit(measured, place.argv(TORCHRUN), "plain_job.py", variant, flags)
        ours = pool.submit(measured, patient, "outlast_job.py", variant, flags)
        return plain.result(), ours.result()


def measured(
    command: tuple[str, ...], script: str, variant: Variant, flags: tuple[object, ...]
) -> Run:
    with job(command, script, *flags) as done:
        turns = [median(steps) for steps in done.turns_s(variant.block)]
        return Run(turns, done.figures["small_s"])


def import_s() -> float:
    """Return the seconds of `import outlast` with all that `init` needs, beyond torch."""
    command = [sys.executable, "-c", IMPORT]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def compare(variant: Variant, args: argparse.Namespace) -> tuple[Spread, Spread, dict[str, object]]:
    """Return the ratio of steps, the ratio of small collectives, and the figures."""
    plain, ours = [], []
    for turn in range(args.repeats):
        one, other = side_by_side(variant, args.turns, args.small)
        plain.append(one)
        ours.append(other)
        print(f"{variant.name}: {turn + 1}/{args.repeats}", file=sys.stderr, flush=True)
    steps = [[turn for run in runs for turn in run.turns_s] for runs in (plain, ours)]
    smalls = [[run.small_s for run in runs] for runs in (plain, ours)]
    ratio, small = bootstrap_ratio(*steps), bootstrap_ratio(*smalls)
    figures = {
        "plain_step_s": median(steps[0]),
        "outlast_step_s": median(steps[1]),
        "step_ratio": ratio,
        "plain_small_s": median(smalls[0]),
        "outlast_small_s": median(smalls[1]),
        "small_ratio": small,
    }
    return ratio, small, figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [variant.name for variant in VARIANTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=20, help="turns of each job in a repeat")
    parser.add_argument("--small", type=int, default=1000, help="small collectives a run")
    args = parser.parse_args()
    if not 2 <= args.turns < TURNS_MAX:
        parser.error(f"--turns must be from 2 to {TURNS_MAX - 1}")
    rows: list[tuple[str, ...]] = []
    bars: dict[str, tuple[float, float]] = {}
    figures: dict[str, object] = {"repeats": args.repeats, "load": load()}
    for variant in VARIANTS:
        if variant.name not in args.only:
            continue
        ratio, small, found = compare(variant, args)
        figures[variant.name] = found
        row = (
            variant.name,
            *(f"{1e3 * float(str(found[key])):.2f}" for key in ("plain_step_s", "outlast_step_s")),
            f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
            f"{small.median:.3f}",
        )
        rows.append(row)
        print("  ".join(row), file=sys.stderr, flush=True)  # a later variant may fail
        if variant.bar:
            bars[f"step, {variant.name}, upper end of the interval"] = (ratio.high, variant.bar)
            bars[f"small all-reduce, {variant.name}"] = (small.median, SMALL_BAR)
    import_times = [import_s() for _ in range(args.repeats)]
    figures["import_s"] = median(import_times)
    bars["import outlast beyond torch, s"] = (median(import_times), 0.1)
    head = ("undisturbed, 4 ranks", "plain ms", "outlast ms", "ratio (95 %)", "small ratio")
    table(head, rows)
    return verdict("overhead", figures, bars)


if __name__ == "__main__":
    sys.exit(main())
