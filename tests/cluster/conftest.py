"""What all tests on hosts compare with."""

from __future__ import annotations

from functools import cache
from typing import Protocol

import pytest
from tests.cluster.cluster import on_one_host

STEPS = "80"


class Undisturbed(Protocol):
    """Function that returns the results of an undisturbed run of `steady_job.py` on one host, by
    rank. `kind`: one of its kinds."""

    def __call__(self, world: int, kind: str = "ddp", steps: str = STEPS) -> list[str]: ...


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return a function that runs each undisturbed run once."""

    @cache
    def run(world: int, kind: str = "ddp", steps: str = STEPS) -> list[str]:
        folder = tmp_path_factory.mktemp("undisturbed")
        return on_one_host(folder, world, steps, kind, str(folder / "hold"))

    return run
