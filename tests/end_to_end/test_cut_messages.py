"""A rank that is killed in the middle of a message, which gloo's receivers do not notice."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.end_to_end.conftest import Runner

pytestmark = pytest.mark.process
JOB = Path(__file__).with_name("jobs") / "large_broadcast_job.py"


@pytest.mark.extended
def test_receivers_of_a_message_that_was_cut_stay(tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    expected = Runner(tmp_path / "undisturbed", 3).run(script=JOB)
    assert expected.code == 0, expected.output
    outcome = Runner(tmp_path, 3).run(job=("--kill",), script=JOB)
    assert outcome.code == 0, outcome.output
    assert (tmp_path / "out" / "killed").exists() and outcome.ranks == expected.ranks
    assert outcome.summary["committed_steps_lost"] == 0, outcome.output
    assert outcome.summary["respawns"] == 1, "only the killed rank was replaced"
