"""Fixtures of the fleet tests: real logs, where this machine has them."""

import os
from pathlib import Path

import pytest

BESIDE = Path(__file__).parents[2].parent / "shared" / "traces"


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are not broken into lines."""
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.fixture(scope="session")
def traces() -> Path:
    """The directory of real logs, which are not part of the project: OUTLAST_TRACES names it."""
    named = os.environ.get("OUTLAST_TRACES")
    found = Path(named) if named else BESIDE
    if not found.is_dir():
        pytest.skip("the traces are not on this machine")
    return found
