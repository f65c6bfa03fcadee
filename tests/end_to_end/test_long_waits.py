"""Long waits of a script that are not hangs."""

from __future__ import annotations

import pytest
from tests.end_to_end.conftest import Outcome, Runner, faults_told, same

from outlast import events

pytestmark = pytest.mark.process

FLOOR = ("--limit=hang_floor_s=2", "--limit=status_s=3", "--limit=hang_ceiling_s=90")
PLACES = (
    "setup:{rank}:0", "next:{rank}:7", "forward:{rank}:8", "backward:{rank}:8",
    "collectives:{rank}:8", "vote:{rank}:8", "apply:{rank}:8", "between:{rank}:9",
    "evaluate:{rank}:10", "end:{rank}:14",
)  # fmt: skip
NOBODY_KNOWS = ("forward", "backward", "collectives", "evaluate")  # others wait in a collective


def undisturbed_by(outcome: Outcome, undisturbed: Outcome) -> None:
    same(outcome, undisturbed)
    assert not [event for event in outcome.events if isinstance(event, events.Noticed)]


@pytest.mark.extended
def test_waits_of_all_ranks_and_of_one_behind_the_vote_cost_nothing(
    runner: Runner, undisturbed: Outcome
) -> None:
    waits = "forward:-1:7:5,apply:-1:8:5,vote:2:9:5,between:0:11:5"
    undisturbed_by(runner.run(*FLOOR, job=("--wait", waits)), undisturbed)


@pytest.mark.long
def test_nobody_is_fenced_while_its_interpreter_is_held(
    runner: Runner, undisturbed: Outcome
) -> None:
    """Rank 3 dies while all others stand in a C extension; they answer when it returns."""
    outcome = runner.run(
        *FLOOR, "--spares=1", "--fault=kill:rank=3,step=9,phase=forward",
        job=("--wait", "held:0:8:10,held:1:8:10,held:2:8:10"),
    )  # fmt: skip
    same(outcome, undisturbed)
    assert faults_told(outcome) == {("killed", 3)}


@pytest.mark.long
@pytest.mark.parametrize("rank", [-1, 0])
@pytest.mark.parametrize("place", PLACES)
def test_a_wait_anywhere_costs_nothing_or_little_once(
    place: str, rank: int, runner: Runner, undisturbed: Outcome
) -> None:
    outcome = runner.run(*FLOOR, "--spares=1", job=("--wait", f"{place.format(rank=rank)}:6"))
    if rank < 0 or not place.startswith(NOBODY_KNOWS):
        undisturbed_by(outcome, undisturbed)
        return
    same(outcome, undisturbed)
    incidents = outcome.summary["incidents"]  # none where phases of a busy machine take as long
    assert len(incidents) <= 1 and faults_told(outcome) <= {("hung", 0)}
    for incident in incidents:
        assert incident["rung"] in ("replace", "respawn")
        assert "--limit hang_floor_s" in outcome.explain()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["forward:-1:8", "apply:-1:8", "apply:1:8", "evaluate:-1:10"])
def test_120_s_at_the_usual_limits_cost_nothing(
    place: str, runner: Runner, undisturbed: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.end_to_end.conftest.DEADLINE_S", 400.0)
    undisturbed_by(runner.run(job=("--wait", f"{place}:120")), undisturbed)
