"""Failures before the first step, and errors around the vote."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.end_to_end.conftest import Outcome, Runner, faults_told, same

pytestmark = pytest.mark.process


def test_a_kill_in_set_up_is_no_error_of_the_script(runner: Runner, undisturbed: Outcome) -> None:
    outcome = runner.run("--spares=1", "--fault=kill:rank=1,phase=setup")
    same(outcome, undisturbed)
    assert ("killed", 1) in faults_told(outcome)
    assert "error of the script" not in outcome.output


@pytest.mark.long
def test_a_kill_before_init_leaves_the_others_starting(
    runner: Runner, undisturbed: Outcome
) -> None:
    outcome = runner.run("--spares=1", "--fault=kill:rank=2,after=0.3")
    same(outcome, undisturbed)
    assert "rank 2 was lost before init()" in outcome.output
    assert outcome.summary["generations"] == 1


@pytest.mark.extended
def test_an_error_behind_a_yes_is_told_as_it_is_and_recovered(
    runner: Runner, undisturbed: Outcome
) -> None:
    """Rank 1's vote fails in no way that a transport does, after the others have its yes."""
    outcome = runner.run(job=("--bug", "vote"))
    same(outcome, undisturbed)
    assert ("raised", 1) in faults_told(outcome)
    assert "contradict" not in outcome.output + outcome.explain()


@pytest.mark.extended
def test_a_rank_that_dies_between_two_rehearsals_is_rehearsed_with(tmp_path: Path) -> None:
    """The survivor has rehearsed once, and the new worker not: both begin anew."""
    script = Path(__file__).with_name("jobs") / "rehearsed_once_job.py"
    (tmp_path / "undisturbed").mkdir()
    expected = Runner(tmp_path / "undisturbed", 2).run(script=script)
    assert expected.code == 0, expected.output
    outcome = Runner(tmp_path, 2).run("--spares=1", job=("--kill",), script=script)
    assert outcome.code == 0, outcome.output
    assert (tmp_path / "out" / "killed").exists() and outcome.ranks == expected.ranks
    assert outcome.summary["committed_steps_lost"] == 0, outcome.output
    assert [one["cause"] for one in outcome.summary["incidents"]] == ["killed"]


def test_a_rank_that_raises_behind_its_step_is_replaced(
    runner: Runner, undisturbed: Outcome
) -> None:
    """Its successor's dry step raises as well, so that nobody knows what its result would be."""
    outcome = runner.run(job=("--bug", "raise after"))
    same(outcome, undisturbed)
    assert ("torn", 1) in faults_told(outcome)
    assert "ValueError: after the step of one rank" in outcome.output
    assert "takes a number" not in outcome.output
