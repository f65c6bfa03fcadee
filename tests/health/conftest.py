"""Fixtures of the tests of node checks: real samples and output width."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a width at which messages are not folded."""
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.fixture
def fixtures() -> Path:
    """Return the directory of real outputs of health tools."""
    place = Path(
        os.environ.get("OUTLAST_TRACES", str(Path(__file__).parents[3] / "shared" / "traces"))
    )
    if not (place / "health_fixtures").is_dir():
        pytest.skip("the traces are not on this machine")
    return place / "health_fixtures"
