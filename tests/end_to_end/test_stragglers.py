"""A rank that becomes slow, in a real run: it is named, and moved once that pays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from outlast import events

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Outcome, Runner

pytestmark = pytest.mark.process
JOB = Path(__file__).with_name("jobs") / "paced_job.py"
# Others' load on this machine slows ranks down by less than this.
SLOW = "--fault=slow:rank=1,step=30,factor=3"


def findings(outcome: Outcome) -> list[events.Warned]:
    found = [event for event in outcome.events if isinstance(event, events.Warned)]
    return [one for one in found if one.check == "straggler" and one.device == "rank 1"]


def notes(outcome: Outcome) -> list[str]:
    found = [event.text for event in outcome.events if isinstance(event, events.Note)]
    return [text for text in found if text.startswith("straggler:") and "rank 1" in text]


def test_a_slow_rank_is_named_and_moves_when_that_pays(runner: Runner) -> None:
    flags = ("--spares=1", "--limit=straggler_wait_s=2", SLOW)
    outcome = runner.run(*flags, job=("--steps=200",), script=JOB)
    assert outcome.code == 0, outcome.output
    first = findings(outcome)[0]
    assert (first.severity, first.worker, first.host) == ("warn", "w1-1", first.host)
    assert "since step" in first.detail and "3 peer(s)" in first.detail
    (due,) = [one for one in findings(outcome) if one.severity == "drain"]
    assert due.lost_s >= 2
    (decision,) = [event for event in outcome.events if isinstance(event, events.Decided)]
    assert (decision.rung, decision.replaced) == ("migrate", ((1, "w1-1", "w1-4"),))
    assert decision.rule == "policy default, straggler, rung 2 of 8"
    assert findings(outcome)[-1].severity == "healthy"
    (helped,) = notes(outcome)
    assert "has helped" in helped
    (incident,) = outcome.summary["incidents"]
    assert incident["committed_steps_lost"] == 0
    assert outcome.summary["straggler_s"] >= 2
    assert "all ranks waited for a slow one" in outcome.explain()


@pytest.mark.extended
def test_larger_work_is_moved_once_and_then_left_alone(runner: Runner) -> None:
    """The new worker is as slow: the rank has more to do, and no machine is slow."""
    flags = ("--spares=2", "--limit=straggler_wait_s=1")
    job = ("--steps=260", "--more-work-of=1", "--from-step=30")
    outcome = runner.run(*flags, job=job, script=JOB)
    assert outcome.code == 0, outcome.output
    moves = [event for event in outcome.events if isinstance(event, events.Decided)]
    assert [move.rung for move in moves] == ["migrate"]
    (note,) = [text for text in notes(outcome) if "its work is larger" in text]
    assert "it does not move again" in note
    assert findings(outcome)[-1].severity == "warn"


@pytest.mark.extended
def test_without_a_spare_it_stays_and_is_named(runner: Runner) -> None:
    flags = ("--limit=straggler_wait_s=1", SLOW)
    outcome = runner.run(*flags, job=("--steps=90",), script=JOB)
    assert outcome.code == 0, outcome.output
    assert outcome.summary["incidents"] == []
    assert findings(outcome)[-1].severity == "drain"
    assert "sentinel: drain: straggler: slow on rank 1" in outcome.explain()
    found = [event.text for event in outcome.events if isinstance(event, events.Note)]
    assert any("is not moved yet, since no warm spare" in text for text in found)
