"""Allocations that fail: run again whole, then in parts on all ranks, then a named end."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.end_to_end.conftest import Outcome, Runner

from outlast import events

pytestmark = pytest.mark.process
JOB = Path(__file__).with_name("jobs") / "memory_job.py"


@pytest.fixture
def pair(runner: Runner) -> Runner:
    """Return a runner of two ranks."""
    runner.world = 2
    return runner


def again(pair: Runner, name: str, *flags: str, job: tuple[str, ...] = ()) -> Outcome:
    """Return another run in the same folder."""
    return pair.end(pair.start(*flags, job=job, script=JOB, name=name), name)


def warned(outcome: Outcome) -> list[str]:
    found = [event for event in outcome.events if isinstance(event, events.Warned)]
    assert all((event.check, event.symptom) == ("oom", "oom") for event in found)
    return [event.detail for event in found]


@pytest.mark.extended
def test_a_second_failure_gives_the_bits_of_accumulation(pair: Runner) -> None:
    by_hand = again(pair, "hand", job=("--by-hand=4",))
    assert by_hand.code == 0, by_hand.output
    expected = by_hand.ranks
    outcome = again(pair, "parts", "--fault=oom:rank=1,step=4,times=2")
    assert outcome.code == 0, outcome.output
    assert outcome.ranks == expected
    (detail,) = warned(outcome)
    assert "step 4" in detail and "then it ran in 2 parts, on all ranks" in detail
    assert [one["rung"] for one in outcome.summary["incidents"]] == ["retry", "retry"]
    assert {one["cause"] for one in outcome.summary["incidents"]} == {"oom"}


@pytest.mark.extended
def test_a_first_failure_changes_no_bit(pair: Runner) -> None:
    expected = again(pair, "clean").ranks
    outcome = again(pair, "once", "--fault=oom:rank=1,step=4")
    assert outcome.code == 0, outcome.output
    assert outcome.ranks == expected
    (detail,) = warned(outcome)
    assert "then it ran whole, with empty caches" in detail


@pytest.mark.extended
def test_state_on_the_host_changes_no_bit(pair: Runner) -> None:
    """A real run, in which the memory of the host is taken for that of a device."""
    expected = again(pair, "clean", job=("--whole",)).ranks
    fault = "--fault=oom:rank=1,step=4,times=2"
    outcome = again(pair, "away", fault, job=("--whole", "--away"))
    assert outcome.code == 0, outcome.output
    assert outcome.ranks == expected
    (detail,) = warned(outcome)
    assert "with empty caches, 0 MiB of optimizers' state on the host" in detail


def test_a_step_that_never_fits_ends_with_the_advice(pair: Runner) -> None:
    """A real allocation of 90,000 GiB on one rank, in a step that cannot be split before it."""
    outcome = again(pair, "never", job=("--greedy=90000", "--whole"))
    assert outcome.code == 1, outcome.output
    framed = " ".join(outcome.output.partition("-" * 40)[2].split())
    assert "oom: in 1 part: RuntimeError" in framed and "can't allocate memory" in framed
    assert "a step that reads its batch by session.split can run in parts" in framed
