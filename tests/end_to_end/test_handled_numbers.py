"""Numbers that a script handles itself: equal to the undisturbed run, or named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import Outcome, Runner

from outlast import events

pytestmark = pytest.mark.process
JOB = Path(__file__).with_name("jobs") / "handled_numbers_job.py"
FAULT = "--fault=nan:rank=1,step=7"


@pytest.fixture
def pair(runner: Runner) -> Runner:
    """Return a runner of two ranks."""
    runner.world = 2
    return runner


def run(pair: Runner, name: str, *flags: str, way: str, more: tuple[str, ...] = ()) -> Outcome:
    """Run the job, which ends well and never moves a rank."""
    started = pair.start(*flags, script=JOB, job=(f"--way={way}", *more), name=name)
    outcome = pair.end(started, name)
    assert outcome.code == 0, outcome.output
    assert not of_kind(outcome, events.Decided)
    return outcome


def of_kind(outcome: Outcome, kind: Any) -> list[Any]:
    return [event for event in outcome.events if isinstance(event, kind)]


def findings(outcome: Outcome) -> list[tuple[str, str]]:
    found = of_kind(outcome, events.Warned)
    assert all(event.check == "nonfinite" for event in found)
    return [(event.severity, event.worker) for event in found]


def notes(outcome: Outcome) -> str:
    return "\n".join(event.text for event in of_kind(outcome, events.Note))


def steps_run_again(outcome: Outcome) -> set[int]:
    """Return the steps that were run again before they counted."""
    refused = of_kind(outcome, events.AttemptRefused)
    return {event.step for event in refused if "and counts" in event.reason}


@pytest.mark.extended
def test_a_scaler_skips_no_step_for_a_transient_error(pair: Runner) -> None:
    clean = run(pair, "clean", way="scaler")
    assert steps_run_again(clean) == {1, 2, 3, 4, 6}, "the search for a scale"
    assert not findings(clean) and clean.ranks[0]["scale"] < 2e37
    ranks = clean.ranks
    cured = run(pair, "cured", FAULT, way="scaler")
    assert cured.ranks == ranks
    assert findings(cured) == [("warn", "w1-1")]
    (one,) = of_kind(cured, events.Warned)
    assert "step 7: the gradient under a GradScaler is not finite on every rank" in one.detail
    assert "rank 1 brought it" in one.detail and "it is finite: a transient error" in one.detail


def test_a_step_that_the_script_leaves_out_is_run_again(pair: Runner) -> None:
    ranks = run(pair, "clean", way="skip").ranks
    cured = run(pair, "cured", FAULT, way="skip")
    assert cured.ranks == ranks and ranks[0]["left out"] == 0
    assert findings(cured) == [("warn", "w1-1")]


@pytest.mark.extended
@pytest.mark.parametrize("way", ["scaler", "scaler fused", "skip", "view"])
def test_what_comes_again_counts_as_without_the_sentinel(pair: Runner, way: str) -> None:
    fault = f"{FAULT},cause=data"
    off = run(pair, "off", "--nan=off", fault, way=way).ranks
    outcome = run(pair, "again", fault, way=way)
    assert outcome.ranks == off
    assert not findings(outcome)
    assert 7 in steps_run_again(outcome)
    if "scaler" not in way:
        assert "rank 1 brought it" in notes(outcome)
        assert "and the same when the step was run again" in notes(outcome)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("way", "fault", "more"),
    [
        ("scaler", "", ("--spot=6",)),
        ("scaler fused clip", FAULT, ()),
        ("where", FAULT, ()),
        ("view", "", ("--spot=6",)),
        ("mask", f"{FAULT},phase=forward", ()),
        ("sometimes", "--fault=nan:rank=1,step=8", ()),  # step 7 has no gradient
    ],
)
def test_a_transient_error_is_cured_in_each_way_of_handling(
    pair: Runner, way: str, fault: str, more: tuple[str, ...]
) -> None:
    ranks = run(pair, "clean", way=way).ranks
    cured = run(pair, "cured", *filter(None, [fault]), way=way, more=more)
    assert cured.ranks == ranks
    ((severity, worker),) = findings(cured)
    assert (severity, worker) == ("warn", "" if more else "w1-1")


@pytest.mark.extended
def test_a_step_that_is_left_out_without_another_sign_is_noted(pair: Runner) -> None:
    """The NaN is in one late gradient, which the script clears."""
    ranks = run(pair, "clean", way="skip").ranks
    cured = run(pair, "cured", way="skip", more=("--spot=6",))
    assert cured.ranks == ranks and not findings(cured)
    assert "step 7: no optimizer has stepped, as one has before; run again" in notes(cured)


@pytest.mark.extended
def test_steps_that_are_left_out_by_design_are_run_again_once(pair: Runner) -> None:
    outcome = run(pair, "clean", way="sometimes")
    assert not findings(outcome) and not notes(outcome).count("transient")
    assert steps_run_again(outcome) == {4}, "steps 1, 4 and 7 have no optimizer"


@pytest.mark.extended
def test_bad_data_in_a_step_that_is_left_out_is_noted(pair: Runner) -> None:
    more = ("--bad=19,45",)  # of steps 3 and 6, of rank 1
    off = run(pair, "off", "--nan=off", way="skip", more=more).ranks
    outcome = run(pair, "bad", way="skip", more=more)
    assert outcome.ranks == off and off[0]["left out"] == 2
    assert steps_run_again(outcome) == {3, 6} and not findings(outcome)
    assert notes(outcome).count("and the same when the step was run again") == 1
