"""`python -m outlast.testing.soak --seeds N [--first K]`: many simulated runs."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from outlast.testing.run_invariants import SimFailure
from outlast.testing.simulated_cluster import run_seed

_EVERY_S = 5.0


def main(argv: list[str] | None = None) -> int:
    """Play seeds one after another; return 1 at the first failure, after printing its story."""
    parser = argparse.ArgumentParser(prog="python -m outlast.testing.soak", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first one (default %(default)s)")
    arguments = parser.parse_args(argv)
    outcomes: Counter[str] = Counter()
    started_s = said_s = time.monotonic()
    turns = struck = 0
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        try:
            outcome = run_seed(seed)
        except SimFailure as failure:
            sys.stdout.write(
                f"{failure}\n\nseed {seed} failed; again with:"
                f" python -m outlast.testing.soak --seeds 1 --first {seed}\n"
            )
            return 1
        outcomes[outcome.outcome] += 1
        turns += outcome.turns
        struck += outcome.struck
        now_s = time.monotonic()
        if now_s - said_s > _EVERY_S:
            said_s = now_s
            sys.stdout.write(f"{sum(outcomes.values())} of {arguments.seeds} seeds\n")
            sys.stdout.flush()
    ends = ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
    sys.stdout.write(
        f"{arguments.seeds} seeds from {arguments.first} held in"
        f" {time.monotonic() - started_s:.1f} s: {ends}; {struck} faults, {turns} turns\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
