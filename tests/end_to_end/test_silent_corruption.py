"""Flipped bits in real runs: found, named, redone or replaced, and a correct end."""

from __future__ import annotations

import pytest
from tests.end_to_end.conftest import Outcome, Runner, faults_told, same

from outlast import events

pytestmark = pytest.mark.process


def findings(outcome: Outcome) -> list[events.Warned]:
    found = (event for event in outcome.events if isinstance(event, events.Warned))
    return [event for event in found if event.check == "corruption"]


def redone(outcome: Outcome) -> int:
    refused = (event for event in outcome.events if isinstance(event, events.AttemptRefused))
    return sum("replicas hold different bytes" in event.reason for event in refused)


def test_a_flip_of_a_reduced_gradient_is_redone_before_it_is_applied(
    runner: Runner, undisturbed: Outcome
) -> None:
    """The lowest bit: its trace would be rounded away."""
    outcome = runner.run("--fault=flip:rank=2,step=5,phase=reduced,tensor=*.4.weight,bit=0")
    same(outcome, undisturbed)
    assert faults_told(outcome) == set(), "no worker is replaced"
    (found,) = findings(outcome)
    assert (found.code, found.severity, found.device) == ("transient", "warn", "rank 2")
    assert "4.weight.grad" in found.detail and "step 5" in found.detail
    assert "corruption: transient on rank 2" in " ".join(outcome.summary["notes"])


def test_a_flip_that_comes_again_in_the_redo_costs_the_worker_its_rank(
    runner: Runner, undisturbed: Outcome
) -> None:
    outcome = runner.run("--spares=1", "--fault=flip:rank=1,step=5,phase=reduced,bit=30,times=2")
    same(outcome, undisturbed)
    assert faults_told(outcome) == {("diverged", 1)}
    assert [found.code for found in findings(outcome)] == ["transient", "lasting"]
    assert findings(outcome)[1].severity == "drain"


@pytest.mark.parametrize(
    ("place", "tensor"),
    [
        ("vote", "*"),
        pytest.param("committed", "model.*.4.weight", marks=pytest.mark.extended),
        pytest.param("committed", "optimizer.*.exp_avg_sq", marks=pytest.mark.extended),
    ],
)
def test_wrong_state_is_found_at_the_next_vote_and_taken_from_the_majority(
    runner: Runner, undisturbed: Outcome, place: str, tensor: str
) -> None:
    """A small model is compared whole at every vote."""
    outcome = runner.run(
        "--spares=1", f"--fault=flip:rank=3,step=5,phase={place},tensor={tensor},bit=30"
    )
    assert faults_told(outcome) == {("diverged", 3)}
    (found,) = findings(outcome)
    assert (found.code, found.device) == ("transient", "rank 3")
    (wrong,) = [
        event
        for event in outcome.events
        if isinstance(event, events.ReplicasCompared) and event.minority
    ]
    assert (wrong.minority, wrong.step) == ((3,), 5)
    same(outcome, undisturbed)
