"""Simulation kernel against closed forms, and its time accounts."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("numba", reason="the simulator is compiled: pip install 'outlast[plan]'")

from outlast.errors import UsageError
from outlast.plan.simulate.compiled_random import cached
from outlast.plan.simulate.replications import simulate
from outlast.plan.simulate.simulated_job import LIVE, MEMORY, STORAGE, SimulatedJob
from outlast.theory import replicas, strategies

Z_MAX = 4.0
NODES = 32
SPENT = ("redo_s", "save_s", "detect_s", "restart_s", "wait_s", "slow_s")
# Time between failures, interval, cost and restart, from much shorter to as long.
GRID = [(1e5, 600.0, 5.0, 300.0), (1e4, 1000.0, 100.0, 300.0), (1e3, 1000.0, 1000.0, 500.0)]


def job(mtbf_s: float = 1e4, **how: object) -> SimulatedJob:
    """One of its nodes fails every `mtbf_s`; there are as many spares as it may take."""
    plain = SimulatedJob(
        work_s=1_000_000.0, interval_s=1000.0, versions=1, step_s=0.0, memory_cost_s=0.0,
        cost_s=100.0, flush_s=0.0, nodes=NODES, spares=4000, replicas=1, copies=0, window_s=0.0,
        node_rate=1 / mtbf_s / NODES, stay_share=0.0, lemons=0.0, lemon_factor=1.0, cure_share=0.0,
        software_rate=0.0, rack_rate=0.0, rack_nodes=8, shape=1.0, scale_s=0.0, age_s=0.0,
        repair_s=10.0, repair_shape=1.0, detect_s=60.0, restart_s=(300.0, 300.0, 300.0),
        software_from=STORAGE, node_from=STORAGE, drop=False, failures_max=1_000_000,
    )  # fmt: skip
    return plain._replace(**how)  # pyright: ignore[reportArgumentType]


def z_of(one: SimulatedJob, goodput: float, replications: int = 400) -> float:
    """How many standard errors the simulated goodput lies from this one."""
    wall_s = simulate(one, replications, seed=7)["wall_s"]
    simulated = one.work_s / wall_s.mean()
    error = wall_s.std() / math.sqrt(replications) / wall_s.mean() * simulated
    return float((simulated - goodput) / error)


@pytest.mark.parametrize("flushed", [0.0, 0.5])
@pytest.mark.parametrize(("mtbf_s", "interval_s", "cost_s", "restart_s"), GRID)
def test_checkpoint_restart(
    mtbf_s: float, interval_s: float, cost_s: float, restart_s: float, flushed: float
) -> None:
    how = {"interval_s": interval_s, "cost_s": cost_s, "flush_s": flushed * interval_s}
    exact = strategies.checkpoint_restart(
        strategies.RecoveryJob(mtbf_s=mtbf_s, detect_s=60.0, **how), restart_s
    )
    one = job(mtbf_s, restart_s=(0.0, 0.0, restart_s), **how)
    assert abs(z_of(one, exact.goodput)) < Z_MAX


@pytest.mark.parametrize(("mtbf_s", "interval_s", "cost_s", "restart_s"), GRID)
def test_peer_memory_with_fallback_to_storage(
    mtbf_s: float, interval_s: float, cost_s: float, restart_s: float
) -> None:
    how = {"interval_s": interval_s, "cost_s": cost_s, "flush_s": 0.25 * interval_s}
    exact = strategies.peer_memory(
        strategies.RecoveryJob(
            mtbf_s=mtbf_s, detect_s=60.0, snapshots=4, snapshot_cost_s=cost_s / 10, **how
        ),
        restart_s / 5, restart_s, 0.3,
    )  # fmt: skip
    one = job(
        mtbf_s, versions=4, memory_cost_s=cost_s / 10, software_rate=0.3 / mtbf_s,
        node_rate=0.7 / mtbf_s / NODES, node_from=MEMORY, copies=NODES,
        restart_s=(0.0, restart_s / 5, restart_s), **how,
    )  # fmt: skip
    assert abs(z_of(one, exact.goodput)) < Z_MAX


@pytest.mark.parametrize(("mtbf_s", "interval_s", "cost_s", "restart_s"), GRID)
def test_a_replica_has_what_was_lost(
    mtbf_s: float, interval_s: float, cost_s: float, restart_s: float
) -> None:
    how = {"interval_s": interval_s, "cost_s": cost_s}
    exact = strategies.migrate(
        strategies.RecoveryJob(mtbf_s=mtbf_s, detect_s=60.0, **how), 100.0, restart_s, 0.2
    )
    one = job(
        mtbf_s, software_rate=0.2 / mtbf_s, node_rate=0.8 / mtbf_s / NODES, node_from=LIVE,
        replicas=NODES, restart_s=(100.0, 0.0, restart_s), **how,
    )  # fmt: skip
    assert abs(z_of(one, exact.goodput)) < Z_MAX


@pytest.mark.parametrize(("spares", "shape"), [(0, 1.0), (2, 0.0), (3, 0.5)])
def test_too_few_spares_are_waited_for(spares: int, shape: float) -> None:
    """Whatever law repairs follow: Erlang's B."""
    saves = strategies.RecoveryJob(
        mtbf_s=1e4, interval_s=1000.0, cost_s=100.0, detect_s=60.0, spares=spares, repair_s=2e4
    )
    exact = strategies.checkpoint_restart(saves, 300.0)
    one = job(spares=spares, repair_s=2e4, repair_shape=shape, work_s=4e6)
    assert exact.wait > 0.05
    assert abs(z_of(one, exact.goodput)) < Z_MAX


@pytest.mark.parametrize("repair_s", [500.0, 50_000.0])
def test_dropped_replicas_come_back(repair_s: float) -> None:
    saves = strategies.RecoveryJob(
        mtbf_s=1e4, interval_s=1000.0, cost_s=0.0, detect_s=60.0, repair_s=repair_s
    )
    exact = replicas.drop_and_regrow(saves, NODES, 100.0)
    one = job(
        cost_s=0.0, spares=0, replicas=NODES, node_from=LIVE, drop=True, repair_s=repair_s,
        restart_s=(100.0, 0.0, 300.0), work_s=4e6,
    )  # fmt: skip
    assert exact.exact and abs(z_of(one, exact.goodput)) < Z_MAX


def test_a_node_alone_fails_as_often_as_the_first_time() -> None:
    """While it is away nothing can fail, and what was drawn for it is kept."""
    exact = strategies.checkpoint_restart(
        strategies.RecoveryJob(mtbf_s=1e4, interval_s=1000.0, cost_s=100.0, detect_s=60.0), 300.0
    )
    alone = job(nodes=1, node_rate=1e-4, rack_nodes=1, spares=1, repair_s=0.0)
    assert abs(z_of(alone, exact.goodput)) < Z_MAX


def test_racks_fail_though_nodes_age() -> None:
    """Thousands of times each node, which leaves as many ages that nobody has any more."""
    exact = strategies.checkpoint_restart(
        strategies.RecoveryJob(mtbf_s=1e4, interval_s=1000.0, cost_s=100.0, detect_s=60.0), 300.0
    )
    racks = job(
        nodes=8, node_rate=0.0, rack_rate=1e-4, rack_nodes=8, shape=0.7, scale_s=1e15, work_s=4e7
    )
    assert abs(z_of(racks, exact.goodput, replications=20)) < Z_MAX


def hard(**how: object) -> SimulatedJob:
    """Everything at once."""
    return job(
        2e4, work_s=300_000.0, interval_s=1000.0, versions=5, step_s=10.0, memory_cost_s=1.0,
        flush_s=400.0, nodes=64, spares=3, replicas=4, copies=2, window_s=100.0, stay_share=0.3,
        lemons=0.1, lemon_factor=20.0, cure_share=0.5, software_rate=1e-5, rack_rate=1e-6,
        repair_s=30_000.0, repair_shape=2.0, node_from=LIVE, software_from=MEMORY,
        restart_s=(20.0, 60.0, 300.0), **how,
    )  # fmt: skip


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("shape", [1.0, 0.7])
def test_every_second_is_in_one_account(drop: bool, shape: float) -> None:
    one = hard(drop=drop, shape=shape, scale_s=6e5, age_s=1e5)
    rows = simulate(one, 200)
    assert np.isfinite(rows["wall_s"]).all() and (rows["done_s"] == one.work_s).all()
    spent = sum(rows[name] for name in SPENT)
    assert np.allclose(one.work_s + spent, rows["wall_s"], rtol=1e-9)
    ended = rows["from_live"] + rows["from_memory"] + rows["from_storage"]
    assert (ended == rows["incidents"]).all()
    assert all((rows[name] >= 0).all() for name in SPENT)
    for name in (*SPENT[:4], "from_live", "from_memory", "wait_s" if not drop else "slow_s"):
        assert rows[name].sum() > 0, name


def test_the_same_seed_gives_the_same_rows_wherever_they_run() -> None:
    one = hard()
    here = simulate(one, 60, seed=3)
    with ThreadPoolExecutor(2) as pool:
        assert (simulate(one, 60, seed=3, executor=pool) == here).all()
    assert (simulate(one, 20, seed=3) == here[:20]).all()
    assert (simulate(one, 20, seed=4) != here[:20]).any()


def test_strategies_meet_the_same_failures() -> None:
    """A cheaper restart changes each run by a little, and no run by chance."""
    slow, fast = (
        simulate(job(restart_s=(0.0, 0.0, restart_s)), 100)["wall_s"] for restart_s in (300.0, 290)
    )
    saved_s = slow - fast
    assert saved_s.std() < slow.std() / 5
    assert saved_s.mean() == pytest.approx(1e6 / 1e4 * 10 * 1.1, rel=0.3)


def test_only_their_own_repair_makes_nodes_young() -> None:
    """10,000 h a node, shape 0.7: a fresh fleet has more failures than an old one in the same time,
    as many as the Weibull renewals say."""
    scale_s, shape, work_s = 2e7, 0.7, 5e6
    fresh, old = (
        simulate(
            job(cost_s=0.0, detect_s=0.0, restart_s=(0.0, 0.0, 0.0), node_from=LIVE, replicas=NODES,
                shape=shape, scale_s=scale_s, age_s=age_s, work_s=work_s), 400)["failures"]
        for age_s in (0.0, 1e9)
    )  # fmt: skip
    first = NODES * (work_s / scale_s) ** shape  # and a little more: those that took their place
    assert first < fresh.mean() < 1.5 * first
    hazard = shape / scale_s * (1e9 / scale_s) ** (shape - 1)
    assert NODES * hazard * work_s < old.mean() < 0.7 * fresh.mean()


def test_a_run_that_cannot_finish_takes_infinite_time() -> None:
    hopeless = simulate(job(10.0, failures_max=1000), 3)
    assert np.isinf(hopeless["wall_s"]).all() and (hopeless["done_s"] == 0).all()
    never = simulate(job(spares=0, repair_s=1e30), 3)
    assert (never["wait_s"] >= 1e29).all()


def test_functions_without_a_file_are_compiled_each_time() -> None:
    code: dict[str, Callable[[int], int]] = {}
    exec("def more(count): return count + 1", code)  # of no file
    assert cached(code["more"])(1) == 2


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"work_s": -1.0}, "work_s"),
        ({"interval_s": math.nan}, "interval_s"),
        ({"flush_s": 2000.0}, "flush_s"),
        ({"replicas": 5}, "replicas"),
        ({"copies": 5}, "copies"),
        ({"lemons": 1.5}, "lemons"),
        ({"rack_nodes": 500}, "rack_nodes"),
        ({"shape": 0.7}, "scale_s"),
        ({"drop": True}, "drop"),
        ({"node_from": 3}, "node_from"),
        ({"nodes": 1.5}, "nodes"),
    ],
)
def test_impossible_jobs_are_refused_by_name(how: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        simulate(job(**how), 1)
