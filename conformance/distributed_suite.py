"""torch's own tests of a backend, as they lie in its wheel, with forked ranks.

python conformance/distributed_suite.py gloo                # the set to compare with
python conformance/distributed_suite.py outlast             # named
python conformance/distributed_suite.py outlast --as gloo   # tests that ask for gloo get outlast
python conformance/distributed_suite.py outlast -k all_reduce

Prints a line of JSON for each test: its name, outcome, seconds, and why it was skipped or failed.
`torch.testing._internal` needs `pip install expecttest`. Torch spawns the ranks of each test; here
they are forked from a process that has imported torch, which takes a tenth of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from outlast.torch_plugin import offer_backend

RANKS = 3
TEST_S = 120  # torch's own limit is 300 s


def distributed_tests(backend: str, named: str) -> type[unittest.TestCase]:
    """Return torch's test class, whose ranks run on `backend`, which the tests know as `named`."""
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test as own

    for feature in ("ddp", "subgroup"):
        common_distributed.DistTestCases.backend_feature[feature].add(named)
    if backend != named:
        _translate_names(backend, named)
    bases: Any = (own.TestDistBackend, own.DistributedTest._DistTestBase)

    class ForkedRanks(*bases):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return ForkedRanks


def _translate_names(backend: str, named: str) -> None:
    """Open groups on `backend` where the tests ask for `named`, and answer with that name."""
    from torch.distributed import distributed_c10d as c10d

    open_group: Any = c10d._new_process_group_helper

    def translated(size: int, rank: int, ranks: Any, asked: Any, *rest: Any, **more: Any) -> Any:
        if str(asked) != named:
            return open_group(size, rank, ranks, asked, *rest, **more)
        opened = open_group(size, rank, ranks, dist.Backend(backend), *rest, **more)
        if (known := c10d._world.pg_map.get(opened[0])) is not None:
            c10d._world.pg_map[opened[0]] = (asked, *known[1:])
        return opened

    c10d._new_process_group_helper = translated


class JsonLines(unittest.TestResult):
    """Prints each test's outcome when it is known."""

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._started_s = time.perf_counter()

    def _print(self, test: unittest.TestCase, outcome: str, reason: str = "") -> None:
        seconds = round(time.perf_counter() - self._started_s, 3)
        name = test.id().rpartition(".")[2]
        line = {"test": name, "outcome": outcome, "s": seconds, "reason": reason}
        print(json.dumps(line), flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._print(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._print(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._print(test, "failed", str(err[1]))

    addError = addFailure


def prepare(backend: str, named: str, folder: str) -> type[unittest.TestCase]:
    """Set up this process for torch's tests, with files in `folder`; return their class."""
    os.environ.update(
        BACKEND=named,
        WORLD_SIZE=str(RANKS),
        TEMP_DIR=folder,
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TEST_S),
    )
    for part in ("barrier", "test_dir", "init_dir"):
        Path(folder, part).mkdir()
    sys.argv[1:] = []  # torch parses them when its helpers are imported
    torch.set_num_threads(1)
    return distributed_tests(backend, named)


def main() -> None:
    """Run the chosen tests."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("backend")
    parser.add_argument("--as", dest="named", help="the backend's name in the tests")
    parser.add_argument("-k", dest="pattern", default="", help="only tests whose names match")
    options = parser.parse_args()
    offer_backend()
    with tempfile.TemporaryDirectory() as folder:
        tests = prepare(options.backend, options.named or options.backend, folder)
        names = unittest.TestLoader().getTestCaseNames(tests)
        chosen = [tests(name) for name in names if re.search(options.pattern, name)]
        unittest.TestSuite(chosen).run(JsonLines())


if __name__ == "__main__":
    main()
