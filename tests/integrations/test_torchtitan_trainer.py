"""torchtitan's debug model loses a rank, and ends as under torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import Runner
from tests.integrations.framework_runs import must_equal, under_torchrun
from tests.integrations.framework_runs import runner as runner

pytest.importorskip("torchtitan", reason="pip install torchtitan==0.3.0 triton")
pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]
JOB = Path(__file__).with_name("jobs") / "torchtitan_job.py"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return under_torchrun(JOB, tmp_path_factory.mktemp("plain"))


def test_an_undisturbed_run_equals_torchtitan(runner: Runner, plain: list[dict[str, Any]]) -> None:
    must_equal(runner.run(script=JOB), plain, 0)


@pytest.mark.parametrize("place", ["1:forward:4", "0:backward:6", "1:logged:4"])
def test_a_killed_rank_is_replaced(runner: Runner, plain: list[dict[str, Any]], place: str) -> None:
    flags = ("--spares=1", "--snapshot-every=1")  # FSDP2 without replicas
    must_equal(runner.run(*flags, script=JOB, job=("--die", place)), plain, 1)
