"""Imports of worker processes before the first line of the script."""

from __future__ import annotations

import subprocess
import sys

HEAVY = """
import sys, torch.distributed
heavy = {"sympy", "torch.distributed.tensor", "torch._dynamo", "matplotlib", "numpy.testing"}
before = heavy & set(sys.modules)
import outlast, outlast.worker.worker_process
outlast.init
print(sorted(heavy & set(sys.modules) - before))
"""


def test_a_worker_imports_nothing_heavy() -> None:
    """`torch.distributed.tensor` alone costs 0.3 s: a quarter of what a successor needs to stand
    by."""
    done = subprocess.run(
        [sys.executable, "-c", HEAVY], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
