"""Seeded schedules in which all hosts leave the run and come back in turn."""

from __future__ import annotations

import pytest

from outlast.controller.lifecycle import node_release
from outlast.testing.fault_plan import ROLL, draw_roll_plan
from outlast.testing.simulated_cluster import SimCluster

pytestmark = pytest.mark.sim
SEEDS = 60


def play(seed: int) -> SimCluster:
    cluster = SimCluster(seed, draw_roll_plan(seed))
    cluster.run()
    return cluster


def test_all_hosts_leave_and_come_back_and_no_step_is_lost() -> None:
    released, whole = 0, 0
    for seed in range(SEEDS):
        cluster = play(seed)
        assert cluster.end is not None
        released += cluster.faults.released
        if [what for _, what in cluster.plan.timed] == [ROLL]:
            assert (cluster.end.outcome, cluster.restarts) == ("done", 0), seed
            whole += cluster.faults.released == len(cluster.agents)
    assert released > 3 * SEEDS and whole > SEEDS / 4, (released, whole)


def test_a_host_that_leaves_with_its_ranks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_release, "_has_ranks", lambda _: False)
    with pytest.raises(AssertionError):
        test_all_hosts_leave_and_come_back_and_no_step_is_lost()
