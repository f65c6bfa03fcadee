"""Jobs whose groups are asked for by the name of torch's own backend."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.end_to_end.conftest import Runner, faults_told

from outlast.worker.groups.backend_registration import answered_names

pytestmark = pytest.mark.process

JOB = Path(__file__).with_name("jobs") / "named_groups_job.py"
ANSWERED = "gloo" in answered_names()


@pytest.mark.skipif(not ANSWERED, reason="this torch opens gloo without a look-up")
def test_equal_after_kills_and_a_raise(runner: Runner, tmp_path: Path) -> None:
    plain = runner.run(script=JOB)
    assert plain.code == 0, plain.output
    undisturbed = plain.ranks
    assert all(rank["names"] == ["gloo", "gloo"] for rank in undisturbed)
    assert undisturbed[0]["losses"] == undisturbed[1]["losses"] != undisturbed[2]["losses"]
    other = Runner(tmp_path / "disturbed")
    other.folder.mkdir()
    outcome = other.run(
        "--spares=1",
        "--fault=kill:rank=1,step=3,phase=backward",
        "--fault=kill:rank=2,step=5,phase=vote",
        "--fault=raise:rank=0,step=7,phase=forward",
        script=JOB,
    )
    assert outcome.code == 0, outcome.output
    assert {("killed", 1), ("killed", 2)} <= faults_told(outcome)
    assert outcome.ranks == undisturbed


@pytest.mark.skipif(ANSWERED, reason="this torch looks gloo up, and Outlast answers")
def test_refused_by_name_before_torch_2_14(runner: Runner) -> None:
    outcome = runner.run(script=JOB)
    assert outcome.code != 0
    assert 'before torch 2.14 also new_group(backend="gloo")' in outcome.output
