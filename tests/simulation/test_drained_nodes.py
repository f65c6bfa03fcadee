"""Seeded schedules of several hosts that the scheduler drains, alone and beside takeovers."""

from __future__ import annotations

import pytest

from outlast.controller import planned_migration
from outlast.testing.fault_plan import DRAINS, draw_drain_plan, draw_takeover_plan
from outlast.testing.simulated_cluster import SimCluster

pytestmark = pytest.mark.sim
HEARD_S = 2.5  # a question to the scheduler, a renewal of each host, and a step


def play(seed: int) -> tuple[int, int]:
    """Play drains alone; return how many have moved ranks, and how many were noted instead."""
    cluster = SimCluster(seed, draw_drain_plan(seed))
    outcome = cluster.run()
    findings, homes = cluster.state.findings, cluster.plan.placement()
    assert (outcome.outcome, outcome.restarts) == ("done", 0)
    assert outcome.generations == 1 + len({t_ns for _, t_ns in findings.moves.values()})
    of_ranks = {homes.home(seat) for seat in range(cluster.plan.world)}
    for key in findings.warned:
        age_s = cluster.timeline.now_s - float(key.code.partition("@")[2])
        if key.host in of_ranks and age_s > HEARD_S:
            assert key in findings.unmoved or key in findings.moves, f"{seed}: {key}"
    return len(findings.moves), len(findings.unmoved)


def test_drains_alone_move_ranks_once_or_are_noted_and_restart_nothing() -> None:
    ends = [play(seed) for seed in range(150)]
    assert sum(moves for moves, _ in ends) > 35 and sum(notes for _, notes in ends) > 60


@pytest.mark.parametrize("function", ["_asks_for_move", "_why_not"])
def test_a_broken_move_is_found(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No drain moves ranks; or each does, to whatever spare there is or is not."""
    monkeypatch.setattr(planned_migration, function, lambda *arguments: "")
    with pytest.raises(AssertionError):
        test_drains_alone_move_ranks_once_or_are_noted_and_restart_nothing()


def test_takeovers_meet_drains() -> None:
    plans = [draw_takeover_plan(seed) for seed in range(400)]
    assert sum(any(what in DRAINS for _, what in plan.timed) for plan in plans) > 50
