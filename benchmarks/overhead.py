"""What an undisturbed run pays: median step, one small collective, and the import.

Alternates plain DDP under torchrun and the same job under Outlast. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from harness import OUTLAST, TORCHRUN, job, median, table, verdict

IMPORT = """
import time, torch, torch.distributed
begin = time.perf_counter()
import outlast
outlast.init
print(time.perf_counter() - begin)
"""


def measured(command: tuple[str, ...], script: str, steps: int, small: int) -> tuple[float, float]:
    """(median step, one small collective) in seconds."""
    with job(command, script, "--steps", steps, "--small", small) as done:
        return done.step_s(), done.figures["small_s"]


def import_s() -> float:
    """`import outlast` with all that `init` needs, beyond torch."""
    command = [sys.executable, "-c", IMPORT]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--small", type=int, default=1000, help="small collectives a run")
    args = parser.parse_args()
    plain, ours, imports = [], [], []
    for turn in range(args.repeats):
        plain.append(measured(TORCHRUN, "plain_job.py", args.steps, args.small))
        ours.append(measured(OUTLAST, "outlast_job.py", args.steps, args.small))
        imports.append(import_s())
        print(f"{turn + 1}/{args.repeats}", file=sys.stderr, flush=True)
    plain_step, our_step = median([r[0] for r in plain]), median([r[0] for r in ours])
    plain_small, our_small = median([r[1] for r in plain]), median([r[1] for r in ours])
    ratio = median([b[0] / a[0] for a, b in zip(plain, ours, strict=True)])
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
        "step_ratios": [b[0] / a[0] for a, b in zip(plain, ours, strict=True)],
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
