"""Simulated runs of odd kinds in which nothing fails: no sentinel finds or does anything."""

from __future__ import annotations

import pytest

from outlast.testing.run_invariants import SimFailure
from outlast.testing.sentinels.simulated_pace import SlowRank
from outlast.testing.sentinels.undisturbed_plans import draw_undisturbed_plan
from outlast.testing.simulated_cluster import SimCluster

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("first", [0, pytest.param(20, marks=pytest.mark.extended)])
def test_no_sentinel_acts_in_an_undisturbed_run(first: int) -> None:
    kinds = set()
    for seed in range(first, 20 + 10 * first):
        plan = draw_undisturbed_plan(seed)
        assert SimCluster(seed, plan).run().outcome == "done"
        kinds.add(plan.pace.kind if plan.pace else "")
    assert len(kinds) >= 8


def test_the_check_finds_a_slow_rank() -> None:
    plan = draw_undisturbed_plan(3)._replace(
        world=4, spares=1, agents=1, phases=100, shard_sets=1, takes_over=False
    )
    assert SimCluster(3, plan).run().outcome == "done"
    with pytest.raises(SimFailure, match="check='straggler'"):
        SimCluster(3, plan._replace(slow=SlowRank(2, 40, 2.5))).run()
