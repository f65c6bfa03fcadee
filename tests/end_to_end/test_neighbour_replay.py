"""Wrong bits before the reduction in real runs: a replay on another rank finds the right one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.end_to_end.conftest import Outcome, Runner, faults_told, same

from outlast import events

pytestmark = pytest.mark.process
ODD_JOB = Path(__file__).with_name("jobs") / "replayed_job.py"


def findings(outcome: Outcome) -> list[events.Warned]:
    found = (event for event in outcome.events if isinstance(event, events.Warned))
    return [event for event in found if event.check == "corruption"]


def notes(outcome: Outcome) -> str:
    return "\n".join(e.text for e in outcome.events if isinstance(e, events.Note))


def test_a_device_that_computes_wrongly_is_found_before_the_step_is_applied(
    runner: Runner, undisturbed: Outcome
) -> None:
    """BatchNorm, dropout, accumulation, and a list that the phase extends: all of it put back."""
    outcome = runner.run(
        "--spares=1",
        "--replay-every=3",
        "--fault=flip:rank=1,step=5,phase=backward,cause=device,tensor=*.4.weight,bit=30",
    )
    same(outcome, undisturbed)
    assert faults_told(outcome) == {("diverged", 1)}
    (found,) = findings(outcome)
    assert (found.code, found.severity, found.device) == ("lasting", "drain", "rank 1")
    assert "in step 5" in found.detail and "model.module.4.weight.grad" in found.detail
    assert "came again when it was computed again" in found.detail
    assert "with equal contributions" in notes(outcome), "step 2 has proved it"


@pytest.mark.extended
@pytest.mark.parametrize("step", [5, 6])
def test_a_transient_error_in_a_replayed_step_is_named_and_not_applied(
    runner: Runner, undisturbed: Outcome, step: int
) -> None:
    outcome = runner.run(
        "--replay-every=1", f"--fault=flip:rank=2,step={step},phase=backward,tensor=*.0.*,bit=3"
    )
    same(outcome, undisturbed)
    assert not faults_told(outcome)
    (found,) = findings(outcome)
    assert (found.code, found.severity, found.device) == ("transient", "warn", "rank 2")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("count", "with equal contributions"),
        ("sharded", "its parameters are sharded"),
        ("static", "its DDP has a static graph"),
        ("rows", "code that depends on the rank"),
    ],
)
def test_odd_steps_are_replayed_or_left_out_by_name(runner: Runner, kind: str, told: str) -> None:
    runner.world = 3
    plain = runner.run(script=ODD_JOB, job=(f"--kind={kind}",)).ranks
    process = runner.start(
        "--replay-every=2", script=ODD_JOB, job=(f"--kind={kind}",), name="replays"
    )
    outcome = runner.end(process, "replays")
    assert outcome.code == 0 and outcome.ranks == plain, outcome.output
    assert not findings(outcome) and not faults_told(outcome)
    assert told in notes(outcome)


@pytest.mark.extended
def test_code_of_one_rank_in_one_step_costs_one_worker_and_is_told(runner: Runner) -> None:
    """It looks like a wrong device, until the rank's new worker does the same."""
    runner.world = 3
    plain = runner.run(script=ODD_JOB, job=("--kind=late",)).ranks
    flags = ("--replay-every=2", "--spares=1")
    process = runner.start(*flags, script=ODD_JOB, job=("--kind=late",), name="replays")
    outcome = runner.end(process, "replays")
    assert outcome.code == 0 and outcome.ranks == plain, outcome.output
    assert faults_told(outcome) == {("diverged", 0)}
    assert "a new worker of rank 0 gives the same, so that no device is wrong" in notes(outcome)


@pytest.mark.extended
def test_two_ranks_are_named_as_a_pair(runner: Runner) -> None:
    runner.world = 2
    fault = "--fault=flip:rank=1,step=5,phase=backward,cause=device,bit=30"
    outcome = runner.run("--replay-every=1", fault, script=ODD_JOB, job=("--kind=plain",))
    assert outcome.code == 0 and not findings(outcome) and not faults_told(outcome)
    assert "two have no majority" in notes(outcome)
