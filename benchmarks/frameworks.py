"""What a framework's step costs more under Outlast than under torchrun, in processor time.

Both jobs take turns of a few steps on the same machine, two ranks each. Counted is the processor
time of a rank's process, all threads together, so that it means something beside other work. What
launchers take is not in it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from harness import (
    OUTLAST,
    TORCHRUN,
    Place,
    bootstrap_ratio,
    job,
    load,
    median,
    spread,
    table,
    verdict,
)

RANKS, BAR = 2, 1.05
FRAMEWORKS = ("lightning", "transformers", "accelerate")
TURNS_MAX = 255  # what a byte of the baton counts


def turns_of(command: tuple[str, ...], flags: tuple[object, ...]) -> list[float]:
    """Return the processor time of a step, by turn, the mean of the ranks; without the first two
    turns, in which functions are rehearsed and watched."""
    with job(command, "framework_job.py", *flags) as done:
        files = [done.folder / f"turns-{rank}.json" for rank in range(RANKS)]
        ranks = [json.loads(path.read_text()) for path in files]
    return [sum(turn) / RANKS for turn in zip(*ranks, strict=True)][2:]


def side_by_side(
    framework: str, args: argparse.Namespace, place: Place
) -> tuple[list[float], list[float]]:
    """Run a framework's plain job and Outlast's in turns."""
    with tempfile.NamedTemporaryFile() as baton, ThreadPoolExecutor(2) as pool:
        baton.write(bytes(2 * RANKS))
        baton.flush()
        flags = (
            *("--framework", framework, "--steps", args.turns * args.block),
            *("--block", args.block, "--accumulate", args.accumulate, "--baton", baton.name),
        )
        patient = (*place.argv(OUTLAST), "--limit=hang_floor_s=300")  # it waits for its turn
        plain = pool.submit(turns_of, place.argv(TORCHRUN), (*flags, "--plain"))
        ours = pool.submit(turns_of, patient, flags)
        return plain.result(), ours.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS)
    parser.add_argument("--turns", type=int, default=30, help="turns of each job")
    parser.add_argument("--block", type=int, default=20, help="steps of a turn")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    args = parser.parse_args()
    if not 3 < args.turns < TURNS_MAX:
        parser.error(f"--turns must be from 4 to {TURNS_MAX - 1}")
    rows, bars, figures = [], {}, dict[str, object](load=load())
    for framework in args.only:
        plain, ours = side_by_side(framework, args, Place(ranks=RANKS))
        ratio = bootstrap_ratio(plain, ours)
        added = spread([b - a for a, b in zip(plain, ours, strict=True)])
        rows.append(
            (
                framework,
                f"{1e3 * median(plain):.2f}",
                f"{1e3 * added.median:.2f} ({1e3 * added.low:.2f} to {1e3 * added.high:.2f})",
                f"{ratio.median:.4f} ({ratio.low:.4f} to {ratio.high:.4f})",
            )
        )
        figures[framework] = {"plain_s": median(plain), "added_s": added, "ratio": ratio}
        bars[f"{framework}: processor time of a step"] = (ratio.median, BAR)
        print(*rows[-1], f"load {load():.1f}", file=sys.stderr, flush=True)
    table(("framework", "torchrun ms", "added ms (95 %)", "ratio (95 %)"), rows)
    return verdict("frameworks", figures, bars)


if __name__ == "__main__":
    sys.exit(main())
