"""Seeded schedules in which a rank is slow, alone and beside takeovers."""

from __future__ import annotations

import pytest

from outlast.controller.sentinels import straggler_watch
from outlast.testing.fault_plan import FaultPlan, draw_takeover_plan
from outlast.testing.sentinels.simulated_pace import SlowRank
from outlast.testing.simulated_cluster import SimCluster

pytestmark = pytest.mark.sim
SEEDS = 12


def plan(seed: int, slow: SlowRank | None) -> FaultPlan:
    """A run of four hosts with a spare, in which nothing else happens."""
    drawn = draw_takeover_plan(seed)
    return drawn._replace(
        world=4, spares=2, agents=4, shard_sets=1, phases=300, strikes=(), timed=(), slow=slow
    )


def moves(cluster: SimCluster) -> list[str]:
    return [key.device for key in cluster.state.findings.moves if key.check == "straggler"]


def test_nobody_moves_where_nobody_is_slow() -> None:
    for seed in range(SEEDS):
        cluster = SimCluster(seed, plan(seed, None))
        assert cluster.run().outcome == "done"
        assert moves(cluster) == [], seed


def test_a_slow_worker_moves_once_and_that_helps() -> None:
    moved = 0
    for seed in range(SEEDS):
        cluster = SimCluster(seed, plan(seed, SlowRank(2, 40, 2.5)))
        assert cluster.run().outcome == "done"
        assert moves(cluster) in ([], ["rank 2"]), seed
        moved += len(moves(cluster))
        assert cluster.state.stragglers.work == (), seed
    assert moved >= SEEDS - 1


def test_a_rank_with_more_work_moves_once() -> None:
    known = 0
    for seed in range(SEEDS):
        cluster = SimCluster(seed, plan(seed, SlowRank(1, 40, 2.5, has_more_work=True)))
        assert cluster.run().outcome == "done"
        assert moves(cluster) in ([], ["rank 1"]), seed
        known += cluster.state.stragglers.work == (1,)
    assert known >= SEEDS - 2


@pytest.mark.extended
def test_takeovers_meet_a_slow_rank() -> None:
    for seed in range(2 * SEEDS):
        timed = draw_takeover_plan(seed).timed
        slow = SlowRank(0, 30, 2.5, has_more_work=seed % 2 == 0)
        cluster = SimCluster(seed, plan(seed, slow)._replace(timed=timed))
        cluster.run()
        assert len(moves(cluster)) <= 2, seed


def test_a_watch_that_never_asks_for_a_move_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(straggler_watch, "price_s", lambda _state: 1e9)
    with pytest.raises(AssertionError):
        test_a_slow_worker_moves_once_and_that_helps()
