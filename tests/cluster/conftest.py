"""What all tests on hosts need: their marks, the hosts, and results to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Protocol

import pytest
from tests.cluster.cluster import Cluster, on_one_host
from tests.cluster.hosts import Hosts, missing_requirement

STEPS = "80"
ON_HOSTS = [
    pytest.mark.cluster,
    pytest.mark.process,
    pytest.mark.skipif(bool(missing_requirement()), reason=missing_requirement()),
]


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


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A run on hosts n1, n2, ...: as many as the parameter says, or HOSTS of the module, or two."""
    count = getattr(request, "param", getattr(request.module, "HOSTS", 2))
    with Hosts(tmp_path, count) as hosts:
        cluster = Cluster(tmp_path, hosts)
        yield cluster
        cluster.close()
