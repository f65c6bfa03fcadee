"""What sentinels find, how soon, and what they cost. See benchmarks/README.md.

`--part flips --count 20 --seed N --results FILE`: a slice of the bit flips; `--part flips --count 0
--results FILE` judges all slices together. `--part stragglers`: slow ranks. `--part cost`: all
sentinels together, `--count` repeats.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import sentinel_cost
import sentinel_flips
import sentinel_stragglers
from harness import verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["flips", "stragglers", "cost"], default="flips")
    parser.add_argument(
        "--count", type=int, default=200, help="flips, or series; 0: judge --results"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, help="file that slices append to")
    args = parser.parse_args()
    if args.part == "cost":
        return verdict("sentinels", *sentinel_cost.measure(args.count))
    if args.part == "stragglers":
        return verdict("sentinels", *sentinel_stragglers.measure(args.count, args.seed))
    if args.count:
        found = sentinel_flips.measure(args.count, args.seed, args.results)
    elif args.results is not None:
        found = sentinel_flips.read(args.results)
    else:
        parser.error("--count 0 needs --results")
    return verdict("sentinels", *sentinel_flips.report(found))


if __name__ == "__main__":
    sys.exit(main())
