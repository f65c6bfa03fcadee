"""What an undisturbed run pays: median step, one small collective, and the import.

Plain DDP under torchrun and the same job under Outlast take turns of five steps: see
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from harness import OUTLAST, TORCHRUN, WORLD, job, median, table, verdict


class Run(NamedTuple):
    """Every step, and one small collective, in seconds."""

    steps_s: list[float]
    small_s: float


IMPORT = """
import time, torch, torch.distributed
begin = time.perf_counter()
import outlast
outlast.init
print(time.perf_counter() - begin)
"""


def side_by_side(steps: int, small: int) -> tuple[Run, Run]:
    """Plain DDP and Outlast, taking turns of a few steps on the same machine."""
    with tempfile.NamedTemporaryFile() as baton, ThreadPoolExecutor(2) as pool:
        baton.write(bytes(2 * WORLD))
        baton.flush()
        flags = ("--steps", steps, "--small", small, "--baton", baton.name)
        patient = (*OUTLAST, "--limit=hang_floor_s=120")  # it waits for the other's turn
        plain = pool.submit(measured, TORCHRUN, "plain_job.py", flags)
        ours = pool.submit(measured, patient, "outlast_job.py", flags)
        return plain.result(), ours.result()


def measured(command: tuple[str, ...], script: str, flags: tuple[object, ...]) -> Run:
    with job(command, script, *flags) as done:
        return Run(done.steps_s(), done.figures["small_s"])


def import_s() -> float:
    """`import outlast` with all that `init` needs, beyond torch."""
    command = [sys.executable, "-c", IMPORT]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--small", type=int, default=1000, help="small collectives a run")
    args = parser.parse_args()
    plain: list[Run] = []
    ours: list[Run] = []
    imports: list[float] = []
    for turn in range(args.repeats):
        one, other = side_by_side(args.steps, args.small)
        plain.append(one)
        ours.append(other)
        imports.append(import_s())
        print(f"{turn + 1}/{args.repeats}", file=sys.stderr, flush=True)
    plain_step, our_step = (median([s for r in runs for s in r.steps_s]) for runs in (plain, ours))
    plain_small, our_small = (median([r.small_s for r in runs]) for runs in (plain, ours))
    ratios = [median(b.steps_s) / median(a.steps_s) for a, b in zip(plain, ours, strict=True)]
    ratio = our_step / plain_step
    table(
        ("undisturbed, 4 ranks", "step ms", "small all-reduce us"),
        [
            ("plain DDP, torchrun", f"{plain_step * 1e3:.1f}", f"{plain_small * 1e6:.0f}"),
            ("outlast run", f"{our_step * 1e3:.1f}", f"{our_small * 1e6:.0f}"),
        ],
    )
    figures = {
        "repeats": args.repeats,
        "plain_step_s": plain_step,
        "outlast_step_s": our_step,
        "step_ratio": ratio,
        "step_ratios": ratios,
        "plain_small_s": plain_small,
        "outlast_small_s": our_small,
        "import_s": median(imports),
    }
    bars = {
        "step, outlast / plain (steps >= 100 ms)": (ratio, 1.02),
        "import outlast beyond torch, s": (figures["import_s"], 0.1),
    }
    return verdict("overhead", figures, bars)


if __name__ == "__main__":
    sys.exit(main())
