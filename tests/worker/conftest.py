"""Fewer objects for code that searches all of them."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> None:
    """Hide the objects of earlier modules from searches: a suite has millions."""
    gc.collect()
    gc.freeze()
