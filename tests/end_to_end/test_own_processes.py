"""Scripts that start processes themselves: a child has no rank, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.end_to_end.conftest import Runner

pytestmark = pytest.mark.process
JOB = Path(__file__).with_name("jobs") / "own_processes_job.py"
EXTENDED = pytest.mark.extended


@pytest.mark.parametrize(
    ("deed", "cause"),
    [
        ("spawn", "outlast.init() was called in SpawnProcess-"),
        ("run in a child", "the session was used in a process that the script has forked"),
        *(
            pytest.param(*pair, marks=EXTENDED)
            for pair in (
                ("fork above init", "outlast.init() was called in a second process"),
                ("subprocess", "that has lost the descriptors of its worker"),
                ("init in a child", "outlast.init() was called in a process that the script"),
                ("state in a child", "the session was used in a process that the script"),
            )
        ),
    ],
)
def test_a_child_that_would_be_a_rank_ends_the_run_by_name(
    tmp_path: Path, deed: str, cause: str
) -> None:
    outcome = Runner(tmp_path, 1).run(script=JOB, job=(f"--do={deed}",))
    assert outcome.code == 1, outcome.output
    assert cause in outcome.output, outcome.output


@pytest.mark.parametrize(
    ("deed", "code", "cause"),
    [
        ("train in a child", 1, "AdamW.step() in a process that the script has forked"),
        pytest.param(
            *("reduce in a child", 0, "allreduce in a process that the script has forked"),
            marks=EXTENDED,
        ),
        pytest.param("train shared weights", 1, "before the vote", marks=EXTENDED),
    ],
)
def test_what_a_child_computes_does_not_reach_the_job(
    tmp_path: Path, deed: str, code: int, cause: str
) -> None:
    outcome = Runner(tmp_path, 2).run(script=JOB, job=(f"--do={deed}",))
    assert (outcome.code, cause in outcome.output) == (code, True), outcome.output


@EXTENDED  # each end of an interpreter takes a second
def test_children_that_end_leave_the_job_alone(tmp_path: Path) -> None:
    """Forked inside of a step, with and without handlers of an interpreter's end."""
    ends = []
    faults = ("--spares=1", "--fault=kill:rank=1,step=3,phase=backward")
    for name, deed, flags in (("whole", "", ()), ("forks", "fork", faults)):
        (folder := tmp_path / name).mkdir()
        outcome = Runner(folder, 2).run(*flags, script=JOB, job=(f"--do={deed}",))
        assert outcome.code == 0, outcome.output
        ends.append(outcome.ranks)
    assert ends[0] == ends[1]


@EXTENDED
def test_a_child_may_read_its_parents_rank(tmp_path: Path) -> None:
    outcome = Runner(tmp_path, 2).run(script=JOB, job=("--do=rank in a child",))
    assert outcome.code == 0, outcome.output
    assert "child of 1 of 2" in outcome.output
