"""Comparison of what passes of torch's tests on plain gloo and on "outlast", in one process tree.

python conformance/compare.py [--json FILE] [-k PATTERN]

Three runs of `distributed_suite.py`: gloo, outlast in its place, outlast by its name. A test that
passes on gloo, and not in its place, must stand in expected.toml with a reason, and no other may.
Exits with 1 where that is not so, where a test fails by name, or where it takes 1.5 times as long.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import torch

HERE = Path(__file__).parent
RATIO_MAX = 1.5
RUN_S_MAX = 1800.0
RUNS = {
    "gloo": ("gloo",),
    "impersonated": ("outlast", "--as", "gloo"),
    "named": ("outlast",),
}


class Outcome(NamedTuple):
    """What became of one test."""

    outcome: str
    seconds: float
    reason: str


def run(words: tuple[str, ...], pattern: str) -> dict[str, Outcome]:
    """Run torch's tests; return their outcomes by name."""
    command = [sys.executable, str(HERE / "distributed_suite.py"), *words, "-k", pattern]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=RUN_S_MAX, check=True
    )
    lines = (json.loads(line) for line in done.stdout.decode().splitlines() if line[:1] == "{")
    return {line["test"]: Outcome(line["outcome"], line["s"], line["reason"]) for line in lines}


def passed(outcomes: dict[str, Outcome]) -> set[str]:
    """Return the names of the tests that passed."""
    return {name for name, each in outcomes.items() if each.outcome == "passed"}


def main() -> int:
    """Run, compare and print."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("-k", dest="pattern", default="")
    parser.add_argument("--json", type=Path, help="write all outcomes to this file")
    options = parser.parse_args()
    found = {name: run(words, options.pattern) for name, words in RUNS.items()}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    expected = tomllib.loads((HERE / "expected.toml").read_text())
    wanted = passed(found["gloo"])
    print(f"torch {torch.__version__}: {len(found['gloo'])} tests, gloo passes {len(wanted)}")
    missing = wanted - passed(found["impersonated"])
    wrong = [
        f"not passed: {name}: {found['impersonated'][name].reason.strip()[-600:]}"
        for name in sorted(missing - expected.keys())
    ]
    wrong += [
        f"expected.toml says that it does not pass: {name}"
        for name in sorted((expected.keys() & wanted) - missing)
    ]
    seconds, gloo_seconds = (
        sum(found[run][name].seconds for name in wanted) for run in ("impersonated", "gloo")
    )
    ratio = seconds / gloo_seconds if wanted else 1.0
    print(
        f"outlast in gloo's place: {len(wanted - missing)} of them, {len(missing)} expected not to;"
        f" {seconds:.1f} s against {gloo_seconds:.1f} s, {ratio:.2f} times"
    )
    if ratio > RATIO_MAX:
        wrong.append(f"took more than {RATIO_MAX} times as long")
    named = found["named"]
    wrong += [
        f"failed by its own name: {name}: {each.reason.strip()[-600:]}"
        for name, each in sorted(named.items())
        if each.outcome == "failed"
    ]
    print(f"outlast by its name: {len(passed(named))}; torch skips the others by the name")
    for line in wrong:
        print(f"  {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
