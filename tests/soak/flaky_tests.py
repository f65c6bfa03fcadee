"""Finder of flaky tests: the suite, repeated beside busy processes.

python tests/soak/flaky_tests.py --times 10 --load 4
python tests/soak/flaky_tests.py --times 50 --load 4 -- tests/end_to_end -k killed

Prints every test that failed at least once, how often, and where the output of each failure is.
The exit code is 1 if any failed. Each round has a deadline, so that a hang ends as a failure.
"""

from __future__ import annotations

import argparse
import collections
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROUND_S_MAX = 3600.0  # the suite takes 12 minutes of two quiet cores
BUSY = "while True: sum(range(10**6))"
WHOLE = "(the whole suite)"


def run_round(number: int, folder: Path, words: list[str]) -> dict[str, str]:
    """Run the suite once; return the output of each test that failed, by its name."""
    result = folder / f"round-{number}.xml"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "--numprocesses=2", "--dist=worksteal"),
        *(f"--junitxml={result}", *words),
    ]
    log = folder / f"round-{number}.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(ROUND_S_MAX)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return {WHOLE: f"no end within {ROUND_S_MAX:.0f} s: {log}"}
    failed = read_failures(result) if result.exists() else {}
    if code and not failed:
        failed[WHOLE] = f"exit code {code}: {log}"
    return failed


def read_failures(result: Path) -> dict[str, str]:
    """Return the failures and errors of one round's JUnit file."""
    failed = {}
    for case in ElementTree.parse(result).iter("testcase"):
        for wrong in (*case.findall("failure"), *case.findall("error")):
            failed[f"{case.get('classname')}::{case.get('name')}"] = wrong.text or ""
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--load", type=int, default=4, help="busy processes beside the suite")
    parser.add_argument("words", nargs="*", help="arguments for pytest")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="outlast-flaky-"))
    found: dict[str, list[Path]] = collections.defaultdict(list)
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(args.load)]
    try:
        for number in range(1, args.times + 1):
            begin_s = time.monotonic()
            failed = run_round(number, folder, args.words)
            for name, output in failed.items():
                path = folder / f"failure-{sum(map(len, found.values())) + 1}.txt"
                path.write_text(f"{name}\n\n{output}\n")
                found[name].append(path)
            spent_s = time.monotonic() - begin_s
            print(f"round {number}: {len(failed)} failed, {spent_s:.0f} s", flush=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    for name, paths in sorted(found.items(), key=lambda item: -len(item[1])):
        print(f"{len(paths)} of {args.times}  {name}")
        for path in paths:
            print(f"    {path}")
    print(f"{len(found)} tests failed at least once; all output: {folder}")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
