"""Strategies against simulations of their models."""

from __future__ import annotations

import heapq
import math
import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from outlast.errors import UsageError
from outlast.theory import intervals
from outlast.theory.spares import stalled_share
from outlast.theory.strategies import (
    DEPTHS,
    RecoveryJob,
    RecoveryOutcome,
    Rung,
    checkpoint_restart,
    ladder,
    migrate,
    peer_memory,
    tune_interval,
)


class Told(NamedTuple):
    """What passed in some part of a simulated life."""

    wall_s: float
    work_s: float
    recovering_s: float
    waiting_s: float


class Life:
    """A job of the model, `M` = `job.mtbf_s`; rounds are counted, time within one is a position."""

    def __init__(self, job: RecoveryJob, rungs: list[Rung], draw: random.Random) -> None:
        self.job, self.rungs, self.draw = job, rungs, draw
        self.saves = max(1, job.snapshots)
        self.chunk_s = job.interval_s / self.saves + job.snapshot_cost_s
        self.round_s = self.saves * self.chunk_s + job.cost_s
        self.rounds, self.at_s, self.awake_s = 0, 0.0, 0.0
        self.saved_at_s = -math.inf
        self.wall_s = self.recovering_s = self.waiting_s = 0.0
        self.back: list[float] = []

    def fails(self) -> None:
        """Works until a failure, and recovers until it works again."""
        self._work(self.draw.expovariate(1 / self.job.mtbf_s))
        deepest = -1
        while True:
            deepest = max(deepest, self._struck())
            rung = self.rungs[deepest]
            self._wait(rung.wait_s)
            need_s = self.job.detect_s + rung.recover_s
            next_s = self.draw.expovariate(1 / self.job.mtbf_s)
            passed_s = min(need_s, next_s)
            self.wall_s += passed_s
            self.awake_s += passed_s
            self.recovering_s += passed_s
            if next_s >= need_s:
                break
        if self.rungs[deepest].loses == "snapshot":
            self.at_s = min(self.saves, self.at_s // self.chunk_s) * self.chunk_s

    def _work(self, length_s: float) -> None:
        begun_s = self.at_s
        self.wall_s += length_s
        rounds, self.at_s = divmod(begun_s + length_s, self.round_s)
        if rounds:
            self.saved_at_s = self.awake_s + rounds * self.round_s - begun_s
        self.awake_s += length_s
        self.rounds += int(rounds)

    def _struck(self) -> int:
        kind = self.draw.choices(range(len(self.rungs)), [one.share for one in self.rungs])[0]
        rung = self.rungs[kind]
        if rung.loses == "checkpoint":
            self.rounds -= self.awake_s - self.saved_at_s < self.job.flush_s
            self.saved_at_s, self.at_s = -math.inf, 0.0
        if rung.takes_node and self.job.spares is not None:
            heapq.heappush(self.back, self.wall_s + self.draw.expovariate(1 / self.job.repair_s))
            while self.back[0] <= self.wall_s:
                heapq.heappop(self.back)
            if len(self.back) > self.job.spares:
                self._wait(heapq.heappop(self.back) - self.wall_s)
        return kind

    def _wait(self, length_s: float) -> None:
        self.wall_s += length_s
        self.waiting_s += length_s

    def told(self) -> Told:
        work_s = self.rounds * self.job.interval_s
        return Told(self.wall_s, work_s, self.recovering_s, self.waiting_s)


def agrees(shares: list[tuple[float, float]], exact: float) -> None:
    """`exact` is the ratio of sums, by |z| < 4 over parts that hardly depend on each other."""
    off = [top - exact * bottom for top, bottom in shares]
    mean = math.fsum(off) / len(off)
    error = math.sqrt(math.fsum((one - mean) ** 2 for one in off)) / len(off)
    assert abs(mean) <= 4 * error + 1e-9
    assert error < 0.05 * math.fsum(bottom for _, bottom in shares) / len(shares)


def simulated(
    job: RecoveryJob, rungs: list[Rung], found: RecoveryOutcome, failures: int = 400
) -> None:
    life = Life(job, rungs, random.Random(20_240_731))
    parts: list[Told] = []
    before = life.told()
    for _ in range(40):
        for _ in range(failures):
            life.fails()
        now = life.told()
        parts.append(Told(*(a - b for a, b in zip(now, before, strict=True))))
        before = now
    agrees([(one.work_s, one.wall_s) for one in parts], found.goodput)
    agrees([(one.recovering_s, one.wall_s) for one in parts], found.detect + found.recover)
    agrees([(one.waiting_s, one.wall_s) for one in parts], found.wait)


RETRY = Rung(name="retry", share=0.3, recover_s=1, loses="nothing", takes_node=False)
REPLACE = Rung(name="replace", share=0.4, recover_s=5, loses="nothing")
ROLLBACK = Rung(name="roll back", share=0.2, recover_s=20, loses="snapshot")
RESTART = Rung(name="restart", share=0.1, recover_s=60, loses="checkpoint")
LADDER = [RETRY, REPLACE, ROLLBACK, RESTART]
SCALES = [0.02, 0.3, 1.0]  # of C, R and tau, from much shorter than M to equal to it


@pytest.mark.parametrize("scale", SCALES)
def test_checkpoint_restart(scale: float) -> None:
    job = RecoveryJob(mtbf_s=100, interval_s=100 * scale, cost_s=30 * scale, flush_s=50 * scale)
    job = replace(job, detect_s=10 * scale)
    found = checkpoint_restart(job, 100 * scale, wait_s=7)
    again = Rung(name="restart", share=1, recover_s=100 * scale, loses="checkpoint", wait_s=7)
    simulated(job, [again], found)
    exact = intervals.efficiency(
        100 * scale, 30 * scale, 100, flush_s=50 * scale, restart_s=110 * scale, down_s=7
    )
    assert found.goodput == pytest.approx(exact)
    assert found.exact and found.falls_back == pytest.approx(1)


@pytest.mark.parametrize("scale", SCALES)
def test_the_whole_ladder(scale: float) -> None:
    """Snapshots, flushes, queues, and failures in the midst of recovery."""
    job = RecoveryJob(
        mtbf_s=100,
        interval_s=200 * scale,
        cost_s=20 * scale,
        flush_s=100 * scale,
        snapshots=5,
        snapshot_cost_s=3 * scale,
        detect_s=10 * scale,
    )
    rungs = [replace(one, recover_s=one.recover_s * 2 * scale) for one in LADDER]
    rungs[3] = replace(rungs[3], wait_s=9.0)
    found = ladder(job, rungs)
    assert found.exact
    simulated(job, rungs, found)


@pytest.mark.parametrize("spares", [0, 2, 6])
def test_the_ladder_short_of_nodes(spares: int) -> None:
    """0.7 of failures take a node for 500 s: 3.5 in repair on the average."""
    job = RecoveryJob(
        mtbf_s=100, interval_s=60, cost_s=2, snapshots=3, snapshot_cost_s=1, detect_s=2,
        spares=spares, repair_s=500,
    )  # fmt: skip
    found = ladder(job, LADDER)
    assert found.exact
    assert found.wait == pytest.approx(stalled_share(spares, 3.5))
    simulated(job, LADDER, found)


def test_named_strategies() -> None:
    job = RecoveryJob(
        mtbf_s=100, interval_s=60, cost_s=2, snapshots=4, snapshot_cost_s=0.5, detect_s=2
    )
    begins = Rung(name="restore", share=0.9, recover_s=10, loses="snapshot")
    found = peer_memory(job, 10, 40, 0.1)
    simulated(job, [begins, replace(RESTART, recover_s=40)], found)
    moves = Rung(name="migrate", share=0.95, recover_s=6, loses="nothing")
    found = migrate(job, 6, 40, 0.05)
    simulated(job, [moves, replace(RESTART, share=0.05, recover_s=40)], found)


recoveries = st.floats(0, 200)
parts = st.lists(st.floats(0.01, 1), min_size=4, max_size=4)


@given(parts, st.tuples(recoveries, recoveries, recoveries, recoveries), st.floats(0.5, 1e4))
def test_nothing_is_lost_twice(
    shares: list[float], lengths: tuple[float, ...], mtbf_s: float
) -> None:
    """All shares of time sum to 1, and none is negative."""
    job = RecoveryJob(
        mtbf_s=mtbf_s, interval_s=50, cost_s=3, flush_s=20, snapshots=5, snapshot_cost_s=1,
        detect_s=2, spares=3, repair_s=300,
    )  # fmt: skip
    rungs = [
        replace(one, share=part / math.fsum(shares), recover_s=length_s)
        for one, part, length_s in zip(LADDER, shares, lengths, strict=True)
    ]
    found = ladder(job, rungs)
    told = [
        found.goodput, found.save, found.redo, found.detect, found.recover, found.wait,
        found.degraded,
    ]  # fmt: skip
    assert min(told) >= 0
    assert math.fsum(told) == pytest.approx(1)
    by_rung = math.fsum(found.recover_by_rung.values())
    assert by_rung == pytest.approx(found.detect + found.recover)
    assert 0 <= found.falls_back <= 1 + 1e-9


@given(st.floats(1.01, 10), st.sampled_from(["mtbf_s", "cost_s", "detect_s", "repair_s"]))
def test_worse_is_worse(factor: float, name: str) -> None:
    job = RecoveryJob(
        mtbf_s=1000, interval_s=50, cost_s=1, flush_s=5, snapshots=5, snapshot_cost_s=0.1,
        detect_s=2, spares=2, repair_s=1000,
    )  # fmt: skip
    changed = getattr(job, name) * (1 / factor if name == "mtbf_s" else factor)
    worse = replace(job, **{name: changed})
    assert ladder(worse, LADDER).goodput < ladder(job, LADDER).goodput
    assert peer_memory(job, 10, 60, 0.1).goodput > peer_memory(job, 10, 60, 0.2).goodput
    assert migrate(job, 10, 60, 0.1).goodput > peer_memory(job, 10, 60, 0.1).goodput


def test_limits() -> None:
    never = RecoveryJob(mtbf_s=math.inf, interval_s=60, cost_s=2, snapshots=4, snapshot_cost_s=0.5)
    found = ladder(never, LADDER)
    assert found.goodput == pytest.approx(60 / 64)
    assert found.save == pytest.approx(4 / 64)
    assert found.redo == found.recover == found.wait == found.failures_per_s == 0
    free = migrate(RecoveryJob(mtbf_s=100, interval_s=60), 0, 0, 0)
    assert free.goodput == pytest.approx(1)
    hopeless = checkpoint_restart(RecoveryJob(mtbf_s=1, interval_s=60), 1e4)
    assert hopeless.goodput == 0 and hopeless.recover == 1
    lost = checkpoint_restart(RecoveryJob(mtbf_s=1, interval_s=1e4), 0)
    assert lost.goodput == 0 and lost.redo == 1


def test_first_order_results_are_marked() -> None:
    job = RecoveryJob(mtbf_s=100, interval_s=60, cost_s=2, flush_s=50, drag=0.1, snapshots=4)
    assert checkpoint_restart(job, 10).exact
    assert not ladder(job, LADDER).exact and not ladder(job, LADDER).in_regime
    assert ladder(replace(job, flush_s=10), LADDER).in_regime
    waits = [replace(one, wait_s=1.0) for one in LADDER]
    assert not ladder(replace(job, drag=0, spares=2, repair_s=10), waits).exact


def test_figures_of_the_prototype() -> None:
    """50,000 h a GPU, C 5, R 300, D 60 s, saves every tau*: goodput from a thousand GPUs to a
    million."""
    for gpus, says in ((1024, 0.990), (16_384, 0.939), (131_072, 0.706), (1_000_000, 0.106)):
        mtbf_s = 50_000 * 3600 / gpus
        job = RecoveryJob(
            mtbf_s=mtbf_s, interval_s=intervals.optimum(5, mtbf_s), cost_s=5, detect_s=60
        )
        assert checkpoint_restart(job, 300).goodput == pytest.approx(says, abs=0.0006)


def test_the_best_interval() -> None:
    job = RecoveryJob(mtbf_s=1000, interval_s=1, cost_s=5, flush_s=30, drag=0.2)
    best = tune_interval(lambda one: checkpoint_restart(one, 60), job)
    assert best.interval_s == pytest.approx(intervals.optimum(11, 1000), rel=1e-5)
    held = tune_interval(lambda one: checkpoint_restart(one, 60), replace(job, flush_s=500, drag=0))
    assert held.interval_s == pytest.approx(500, rel=1e-6)


def test_the_best_number_of_snapshots() -> None:
    """Against all of them."""
    job = RecoveryJob(
        mtbf_s=2000, interval_s=1, cost_s=30, snapshots=1, snapshot_cost_s=1, detect_s=2
    )

    def strategy(one: RecoveryJob) -> RecoveryOutcome:
        return peer_memory(one, 10, 60, 0.1)

    best = tune_interval(strategy, job)
    goodput = strategy(best).goodput
    for snapshots in range(1, 40):
        for factor in (0.8, 0.95, 1.0, 1.05, 1.25):
            other = replace(best, snapshots=snapshots, interval_s=best.interval_s * factor)
            assert strategy(other).goodput <= goodput + 1e-12
    assert 10 < best.snapshots < 30


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mtbf_s": 0}, "mtbf_s must be above 0"),
        ({"interval_s": -1}, "interval_s must be above 0"),
        ({"drag": 2}, "drag is a share"),
        ({"flush_s": 100}, r"flush_s \(100\) is above interval_s \(60\)"),
        ({"spares": -1}, "spares must be 0 or above"),
        ({"snapshots": 2.5}, r"snapshots must be a whole number, not 2\.5"),
        ({"snapshots": 0}, "roll back begins again from a snapshot, and snapshots is 0"),
    ],
)
def test_jobs_that_cannot_be(change: dict[str, float], said: str) -> None:
    job = RecoveryJob(mtbf_s=100, interval_s=60, snapshots=4)
    with pytest.raises(UsageError, match=said):
        ladder(replace(job, **change), LADDER)


def test_ladders_that_cannot_be() -> None:
    job = RecoveryJob(mtbf_s=100, interval_s=60, snapshots=4)
    with pytest.raises(UsageError, match="roll back loses less than the rung before it"):
        ladder(job, LADDER[::-1])
    with pytest.raises(UsageError, match=r"must sum to 1, not 0\.9"):
        ladder(job, LADDER[:3])
    with pytest.raises(UsageError, match="falls_back is a share"):
        migrate(job, 1, 1, 1.5)
    assert DEPTHS == ("nothing", "snapshot", "checkpoint")
