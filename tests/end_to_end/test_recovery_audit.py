"""Ranks with wrong bits after a recovery: named, replaced, and a correct end."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.end_to_end.conftest import Outcome, Runner, faults_told, same

from outlast import events

pytestmark = pytest.mark.process


def compared(outcome: Outcome) -> list[events.ReplicasCompared]:
    return [event for event in outcome.events if isinstance(event, events.ReplicasCompared)]


def test_a_wrong_rank_after_a_recovery_is_named_and_replaced(
    runner: Runner, undisturbed: Outcome
) -> None:
    """Rank 1 is wrong right after the step that rank 2's death interrupted: no gradient of it is
    used, and so the end is the undisturbed run's."""
    outcome = runner.run(
        "--spares=2", "--audit-every=0",
        "--fault=kill:rank=2,step=5,phase=backward",
        "--fault=flip:rank=1,step=5,tensor=optimizer.state.*.4.weight.exp_avg_sq",
    )  # fmt: skip
    same(outcome, undisturbed)
    assert faults_told(outcome) == {("killed", 2), ("diverged", 1)}
    (wrong,) = [event for event in compared(outcome) if event.minority]
    assert (wrong.minority, wrong.majority, wrong.step) == ((1,), (0, 2, 3), 5)
    assert wrong.tensors == ("optimizer.state.model.module.4.weight.exp_avg_sq",)
    last = compared(outcome)[-1]
    assert (last.step, last.parts, last.minority) == (outcome.summary["steps"], 1, ())
    told = " ".join(outcome.explain().split())
    assert "exp_avg_sq" in told and "rank 1" in told


@pytest.mark.extended
def test_without_a_majority_all_go_back_to_what_was_equal(
    runner: Runner, undisturbed: Outcome
) -> None:
    """Two of four ranks are wrong alike. The copies of steps 4 and 6, saved after the last
    agreement, are passed over."""
    outcome = runner.run(
        "--audit-every=0", "--checkpoint-every=2", "--keep=last=9",
        "--fault=kill:rank=2,step=3,phase=backward",
        "--fault=kill:rank=0,step=7,phase=backward",
        "--fault=flip:rank=1,step=7", "--fault=flip:rank=3,step=7",
    )  # fmt: skip
    same(outcome, undisturbed)
    (wrong,) = [event for event in compared(outcome) if event.minority]
    assert not wrong.decides and wrong.step == 7
    decided = [event for event in outcome.events if isinstance(event, events.Decided)]
    assert {event.step for event in decided if event.rung in ("rollback", "restart")} == {2}
    assert any(kind == "diverged" for kind, _ in faults_told(outcome))


@pytest.mark.extended
def test_a_recovery_behind_the_last_step_is_audited_as_well(runner: Runner) -> None:
    """Rank 2 dies in the evaluation behind the loop; the audit of the loop's end lies before it."""
    script = Path(__file__).with_name("jobs") / "evaluation_job.py"
    outcome = runner.run("--spares=1", "--fault=kill:rank=2,step=4,phase=eval", script=script)
    assert outcome.code == 0, outcome.output
    assert faults_told(outcome) == {("killed", 2)}
    end, behind = compared(outcome)[-2:]
    assert (end.generation, behind.generation) == (1, 2)
    assert behind.n > end.n and (behind.parts, behind.minority) == (1, ())
    first, *others = outcome.ranks
    assert others == [first] * 3
