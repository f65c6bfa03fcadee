"""Comparison of what passes on plain gloo and on "outlast", in one process tree.

python conformance/compare.py [--json FILE] [-k PATTERN] [--torch-source DIR]

Runs of `run_suite.py`. Suites "distributed" and, where DIR is given, "source" on gloo, on outlast
in its place, and on outlast by its name; suite "parallel" on gloo and on outlast. A test that
passes on gloo, and not on outlast, must stand in expected.toml with a reason, and no other may.
Exits with 1 where that is not so, where a test of "distributed" fails by name, or where outlast
takes 1.5 times as long.
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
NAMED, IN_PLACE = ("outlast",), ("outlast", "--as", "gloo")
OWN = {  # how each suite runs on outlast, to compare with gloo; the first is kept as its outcome
    "distributed": (IN_PLACE,),
    "parallel": (NAMED,),
    "source": (NAMED, IN_PLACE),
}


class Outcome(NamedTuple):
    """What became of one test."""

    outcome: str
    seconds: float
    reason: str


def run(suite: str, words: tuple[str, ...], options: argparse.Namespace) -> dict[str, Outcome]:
    """Run the tests of a suite; return their outcomes by name."""
    command = [sys.executable, str(HERE / "run_suite.py"), suite, *words, "-k", options.pattern]
    if options.torch_source:
        command += ["--torch-source", str(options.torch_source)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=RUN_S_MAX, check=True
    )
    lines = (json.loads(line) for line in done.stdout.decode().splitlines() if line[:1] == "{")
    return {line["test"]: Outcome(line["outcome"], line["s"], line["reason"]) for line in lines}


def passed(outcomes: dict[str, Outcome]) -> set[str]:
    """Return the names of the tests that passed."""
    return {name for name, each in outcomes.items() if each.outcome == "passed"}


def expected_failures(suite: str) -> set[str]:
    """Return the tests of a suite that pass on gloo and not on outlast, by expected.toml."""
    return set(tomllib.loads((HERE / "expected.toml").read_text())[suite])


def compare(suite: str, gloo: dict[str, Outcome], own: dict[str, Outcome]) -> list[str]:
    """Print the comparison of a suite; return what is wrong."""
    expected, wanted = expected_failures(suite), passed(gloo)
    missing = wanted - passed(own)
    wrong = [
        f"not passed: {name}: {own[name].reason.strip()[-600:] if name in own else 'no outcome'}"
        for name in sorted(missing - expected)
    ]
    wrong += [
        f"expected.toml says that it does not pass: {name}"
        for name in sorted((expected & wanted) - missing)
    ]
    seconds, gloo_seconds = (
        sum(found[name].seconds for name in wanted if name in found) for found in (own, gloo)
    )
    ratio = seconds / gloo_seconds if wanted else 1.0
    print(
        f"{suite}: {len(gloo)} tests, gloo passes {len(wanted)}; outlast {len(wanted - missing)} of"
        f" them, {len(missing & expected)} expected not to; {seconds:.1f} s against"
        f" {gloo_seconds:.1f} s, {ratio:.2f} times"
    )
    if ratio > RATIO_MAX:
        wrong.append(f"{suite} took more than {RATIO_MAX} times as long")
    return wrong


def main() -> int:
    """Run, compare and print."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("-k", dest="pattern", default="")
    parser.add_argument("--json", type=Path, help="write all outcomes to this file")
    parser.add_argument("--torch-source", type=Path, help="a checkout of PyTorch")
    parser.add_argument("--suite", choices=OWN, action="append", help="this suite only")
    options = parser.parse_args()
    chosen = options.suite or ["distributed", "parallel", *["source"] * bool(options.torch_source)]
    print(f"torch {torch.__version__}", flush=True)
    outcomes: dict[str, dict[str, Outcome]] = {}
    wrong: list[str] = []
    for suite in chosen:
        gloo, *own = (run(suite, words, options) for words in (("gloo",), *OWN[suite]))
        outcomes |= {f"{suite} gloo": gloo, f"{suite} outlast": own[0]}
        for found in own:
            wrong += compare(suite, gloo, found)
    if "distributed" in chosen:
        named = outcomes["distributed by name"] = run("distributed", NAMED, options)
        wrong += [
            f"failed by its own name: {name}: {each.reason.strip()[-600:]}"
            for name, each in sorted(named.items())
            if each.outcome == "failed"
        ]
        print(f"outlast by its name: {len(passed(named))}; torch skips the others by the name")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(outcomes, indent=1))
    for line in wrong:
        print(f"  {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
