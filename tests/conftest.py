"""Signal handlers, hypothesis profile, PYTHONPATH and shares of all tests.

A shell that runs the tests in the background ignores SIGINT, and launchers inherit that; the
default handler is restored. Child processes import `children/sitecustomize.py`.
"""

from __future__ import annotations

import os
import signal
import zlib
from pathlib import Path

import pytest
from hypothesis import settings

CHILDREN = str(Path(__file__).with_name("children"))

settings.register_profile("outlast", deadline=None)  # a busy machine takes its time
settings.load_profile("outlast")
signal.signal(signal.SIGINT, signal.default_int_handler)
paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if CHILDREN not in paths:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [CHILDREN, *paths]))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--share`."""
    parser.addoption("--share", metavar="K/N", default="1/1", help="only every N-th test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of share K of N; shares are disjoint, and their union is all tests. A script
    of the catalogue is in one share with all its modes."""
    share, shares = map(int, config.getoption("--share").split("/"))
    if not 1 <= share <= shares:
        raise pytest.UsageError(f"--share {share}/{shares}: K is from 1 to N")
    others = {item for item in items if _share_of(item, shares) != share}
    if others:
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]


def _share_of(item: pytest.Item, shares: int) -> int:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    name: str = getattr(parameters.get("script"), "name", item.nodeid)
    return zlib.crc32(name.encode()) % shares + 1
