"""Pipelines without replicas that lose a stage: from a copy in memory, and from the disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.end_to_end.conftest import Outcome, Runner
from torch.distributed.pipelining import _utils

from outlast import events

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        not hasattr(_utils, "InferenceMode"), reason="pipelines of torch 2.11 are refused"
    ),
]
JOB = Path(__file__).with_name("jobs") / "pipeline_job.py"


def run(folder: Path, *flags: str) -> Outcome:
    folder.mkdir()
    outcome = Runner(folder, world=2).run(*flags, script=JOB)
    assert outcome.code == 0, outcome.output
    assert "did not strike" not in outcome.output, outcome.output
    return outcome


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(tmp_path_factory.mktemp("pipeline") / "undisturbed")


def test_a_lost_stage_comes_from_the_newest_checkpoint(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    kill = "--fault=kill:rank=1,step=9,phase=backward"
    outcome = run(tmp_path / "killed", "--checkpoint-every=3", "--spares=1", kill)
    assert outcome.ranks == undisturbed.ranks
    assert 0 < outcome.summary["committed_steps_lost"] <= 3
    assert outcome.summary["loss"] == undisturbed.summary["loss"] is not None


@pytest.mark.extended
def test_a_lost_stage_is_rebuilt_from_keepers_memory(tmp_path: Path, undisturbed: Outcome) -> None:
    kill = "--fault=kill:rank=0,step=7,phase=forward"
    flags = ("--snapshot-every=1", "--copies=2", "--spares=1", kill)
    outcome = run(tmp_path / "killed", *flags)
    assert outcome.ranks == undisturbed.ranks
    assert outcome.summary["committed_steps_lost"] == 0
    decided = [e.rung for e in outcome.events if isinstance(e, events.Decided)]
    assert decided == ["rebuild"]
