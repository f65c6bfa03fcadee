"""Tests of a machine with a GPU. Two ranks share it where it is the only one, as NCCL 2.30 allows.

`--device=cpu` runs the same tests on processors and gloo, which tests the tests.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.end_to_end.conftest import Runner, runner  # noqa: F401 - a fixture

WORLD = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--device` and `--record`."""
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda")
    parser.addoption("--record", metavar="FILE", help="write what ran, and on which versions")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("this machine has no GPU that torch can use")
    return name


@pytest.fixture(scope="session", autouse=True)
def shared_gpu() -> Iterator[None]:
    """Let several ranks use the only GPU: an experimental setting of NCCL, with few blocks each."""
    settings = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items() if torch.cuda.device_count() == 1 else ():
            patch.setenv(name, os.environ.get(name, value))
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Begin the record, if one is asked for."""
    if file := config.getoption("--record", None):
        config.pluginmanager.register(Record(Path(file), config.getoption("--device")))


class Record:
    """The outcome of each test, written with the versions that it holds for."""

    def __init__(self, file: Path, device: str) -> None:
        self._file, self._device = file, device
        self._outcomes: list[tuple[str, str, float]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a test."""
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.rpartition("::")[2]
            self._outcomes.append((name, report.outcome, report.duration))

    def pytest_sessionfinish(self) -> None:
        """Write the record."""
        self._file.write_text(_record(self._device, self._outcomes))


def _record(device: str, outcomes: list[tuple[str, str, float]]) -> str:
    """Return a page with a row for each test."""
    lines = [
        "# Tests on GPUs",
        "",
        f"`make gpu`, {datetime.datetime.now(datetime.UTC).date()}: {_versions(device)}.",
        "",
        "| test | outcome | s |",
        "|---|---|---|",
        *(f"| `{name}` | {outcome} | {seconds:.1f} |" for name, outcome, seconds in outcomes),
    ]
    return "\n".join([*lines, ""])


def _versions(device: str) -> str:
    if device == "cpu" or not torch.cuda.is_available():
        return f"no GPU; torch {torch.__version__}"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    count = torch.cuda.device_count()
    return f"{count} x {torch.cuda.get_device_name()}; torch {torch.__version__}, NCCL {nccl}"
