"""Seeded schedules of notices, true ones and others, alone and beside takeovers."""

from __future__ import annotations

from collections import Counter

import pytest

from outlast.controller import planned_migration
from outlast.controller.lifecycle import notice_deadlines
from outlast.testing.fault_plan import NOTICES, draw_notice_plan, draw_takeover_plan
from outlast.testing.simulated_cluster import SimCluster, run_takeover_seed

pytestmark = pytest.mark.sim
SEEDS = 75


def play(seed: int) -> SimCluster:
    cluster = SimCluster(seed, draw_notice_plan(seed))
    cluster.run()
    return cluster


def test_notices_alone_move_ranks_or_end_the_run_and_break_no_invariant() -> None:
    ends, moves, late = Counter[str](), 0, 0
    for seed in range(SEEDS):
        cluster = play(seed)
        assert cluster.end is not None
        ends[cluster.end.outcome] += 1
        moves += len(cluster.state.findings.moves)
        late += sum(answer == "late" for answer, _ in cluster.state.notices.answers.values())
        if cluster.end.outcome == "interrupted":
            detail = cluster.end.cause.detail if cluster.end.cause else ""
            assert detail.startswith("operator: "), f"{seed}: {detail}"
    assert ends["done"] > 45 and ends["interrupted"] > 5 and moves > 15 and late > 5, ends


def test_a_notice_to_a_rank_with_spares_and_replicas_ends_no_run() -> None:
    for seed in range(SEEDS):
        plan = draw_notice_plan(seed)
        timed = tuple((time_s, "notice rank") for time_s, _ in plan.timed)
        cluster = SimCluster(seed, plan._replace(timed=timed[:2], spares=4, shard_sets=1))
        assert cluster.run().outcome == "done", seed


@pytest.mark.extended
def test_a_move_that_waits_for_no_boundary_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_migration, "begin_departure", lambda *_: None)
    with pytest.raises(AssertionError):
        test_notices_alone_move_ranks_or_end_the_run_and_break_no_invariant()


@pytest.mark.extended
def test_an_end_that_is_not_decided_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice_deadlines, "_is_stuck", lambda *_: False)
    monkeypatch.setattr(notice_deadlines, "_end", lambda *_: None)
    with pytest.raises(AssertionError):
        test_notices_alone_move_ranks_or_end_the_run_and_break_no_invariant()


def test_takeovers_meet_notices() -> None:
    seeds = [
        seed
        for seed in range(600)
        if any(what in NOTICES for _, what in draw_takeover_plan(seed).timed)
    ]
    assert len(seeds) > 80
    for seed in seeds[:60]:
        run_takeover_seed(seed)
