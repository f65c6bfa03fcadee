"""Ranks that ask for another device, in simulated runs."""

from __future__ import annotations

import pytest

from outlast import events
from outlast.controller.save_schedule.save_tiers import SavePolicy
from outlast.testing import SimCluster
from outlast.testing.fault_plan import FaultPlan, PlannedFault
from outlast.testing.simulated_cluster import SimOutcome

pytestmark = pytest.mark.sim


def _play(seed: int, spares: int) -> tuple[SimOutcome, list[str]]:
    """Let a rank ask at its third vote and later ones; return the outcome and the rungs taken."""
    plan = FaultPlan(
        world=3,
        spares=spares,
        agents=1 + seed % 3,
        phases=12,
        checkpoint_every=0,
        strikes=(PlannedFault("slot", "nonfinite", 9 + seed, -1),),
        timed=(),
        bug_at=-1,
        attempts_max=3,
        duplicates=0.1,
        repeats=bool(seed % 2),
        rot=False,
        policy=SavePolicy(),
        fails=0.0,
    )
    cluster = SimCluster(seed, plan)
    outcome = cluster.run()
    written = [getattr(what, "event", what) for _, what in cluster.story]
    return outcome, [each.rung for each in written if isinstance(each, events.Decided)]


@pytest.mark.parametrize(("spares", "rung"), [(1, "migrate"), (0, "retry")])
def test_a_rank_moves_where_there_is_a_spare_and_no_step_is_lost(spares: int, rung: str) -> None:
    decided: list[str] = []
    for seed in range(12):
        outcome, rungs = _play(seed, spares)
        assert (outcome.outcome, outcome.restarts) == ("done", 0), f"seed {seed}"
        decided += rungs
    assert decided and set(decided) == {rung}
