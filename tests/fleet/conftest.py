"""Fixtures of the fleet tests: real logs, where this machine has them."""

import os
from pathlib import Path

import pytest

BESIDE = Path(__file__).parents[2].parent / "shared" / "traces"


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a width at which messages are not folded."""
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.fixture(scope="session")
def traces() -> Path:
    """Return the directory of real logs outside the project, named by OUTLAST_TRACES."""
    named = os.environ.get("OUTLAST_TRACES")
    found = Path(named) if named else BESIDE
    if not found.is_dir():
        pytest.skip("the traces are not on this machine")
    return found
