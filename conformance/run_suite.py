"""Tests of a suite on one backend; a line of JSON for each.

python conformance/run_suite.py distributed gloo                # the set to compare with
python conformance/run_suite.py distributed outlast             # named
python conformance/run_suite.py distributed outlast --as gloo   # tests that ask for gloo get ours
python conformance/run_suite.py parallel outlast -k fsdp
python conformance/run_suite.py source outlast --torch-source DIR

A line has the test's name, outcome, seconds, and why it was skipped or failed.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

import suites

from outlast.torch_plugin import offer_backend


class JsonLines(unittest.TestResult):
    """Prints each test's outcome when it is known."""

    def __init__(self, names: dict[str, str]) -> None:
        """`names` are printed in place of tests' identifiers."""
        super().__init__()
        self._names = names

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._started_s = time.perf_counter()

    def _print(self, test: unittest.TestCase, outcome: str, reason: str = "") -> None:
        seconds = round(time.perf_counter() - self._started_s, 3)
        name = self._names[test.id()]
        line = {"test": name, "outcome": outcome, "s": seconds, "reason": reason}
        print(json.dumps(line), flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._print(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._print(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._print(test, "failed", str(err[1]))

    addError = addFailure


def main() -> None:
    """Run the chosen tests."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("suite", choices=("distributed", "parallel", "source"))
    parser.add_argument("backend")
    parser.add_argument("--as", dest="named", help="the backend's name in the tests")
    parser.add_argument("--torch-source", type=Path, help="a checkout of PyTorch")
    parser.add_argument("-k", dest="pattern", default="", help="only tests whose names match")
    options = parser.parse_args()
    named = options.named or options.backend
    offer_backend()
    with tempfile.TemporaryDirectory() as folder:
        suites.prepare(folder, named)
        suite = suites.load(options.suite, options.backend, named, options.torch_source)
        chosen = {
            name: tests(name.rpartition(".")[2])
            for name, tests in suite.items()
            if re.search(options.pattern, name)
        }
        names = {test.id(): name for name, test in chosen.items()}
        unittest.TestSuite(chosen.values()).run(JsonLines(names))


if __name__ == "__main__":
    main()
