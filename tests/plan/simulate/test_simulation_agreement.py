"""Agreement of closed form, kernel and event simulator, with costs, restarts and all intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("numba", reason="the simulator is compiled: pip install 'outlast[plan]'")

from outlast.plan.simulate.narrator import narrate
from outlast.plan.simulate.replications import simulate
from outlast.plan.simulate.simulated_job import LIVE, MEMORY, STORAGE, SimulatedJob
from outlast.theory import strategies

Z_MAX = 4.0
NODES = 8
STORIES, REPLICATIONS = 25, 2000
DETECT_S = 60.0
# Time between failures, interval, cost, restart, and work for some ten failures each.
GRID = [
    (1e5, 600.0, 5.0, 300.0, 6e5),
    (1e4, 1000.0, 100.0, 300.0, 1e5),
    (1e3, 1000.0, 1000.0, 500.0, 5e3),
]


def job(interval_s: float, cost_s: float, work_s: float, **how: object) -> SimulatedJob:
    """Repairs are short, and spares many: nobody waits."""
    plain = SimulatedJob(
        work_s=work_s, interval_s=interval_s, versions=1, step_s=0.0, memory_cost_s=0.0,
        cost_s=cost_s, flush_s=0.0, nodes=NODES, spares=12, replicas=1, copies=0, window_s=0.0,
        node_rate=0.0, stay_share=0.0, lemons=0.0, lemon_factor=1.0, cure_share=0.0,
        software_rate=0.0, rack_rate=0.0, rack_nodes=8, shape=1.0, scale_s=0.0, age_s=0.0,
        repair_s=10.0, repair_shape=1.0, detect_s=DETECT_S, restart_s=(0.0, 0.0, 0.0),
        software_from=STORAGE, node_from=STORAGE, drop=False, failures_max=1_000_000,
    )  # fmt: skip
    return plain._replace(**how)  # pyright: ignore[reportArgumentType]


def z_of(walls_s: Sequence[float], work_s: float, goodput: float) -> float:
    """How many standard errors these runs lie from that share of useful time."""
    return float((np.mean(walls_s) - work_s / goodput) / error_s(walls_s))


def error_s(walls_s: Sequence[float]) -> float:
    """Of their mean."""
    return float(np.std(walls_s, ddof=1)) / math.sqrt(len(walls_s))


def agree(one: SimulatedJob, exact: strategies.RecoveryOutcome, rungs: set[str]) -> None:
    """Pairwise; the stories meet other failures than the kernel."""
    assert exact.exact
    told = [narrate(one, seed=1, replication=k) for k in range(STORIES)]
    story = [each.tallies["wall_s"] for each in told]
    kernel = [float(wall_s) for wall_s in simulate(one, REPLICATIONS, seed=2)["wall_s"]]
    assert {rung for each in told for rung in each.rungs} == rungs
    assert abs(z_of(story, one.work_s, exact.goodput)) < Z_MAX
    assert abs(z_of(kernel, one.work_s, exact.goodput)) < Z_MAX
    between_s = abs(np.mean(story) - np.mean(kernel))
    assert between_s / math.hypot(error_s(story), error_s(kernel)) < Z_MAX


@pytest.mark.parametrize(("mtbf_s", "interval_s", "cost_s", "restart_s", "work_s"), GRID)
def test_restarts_from_storage(
    mtbf_s: float, interval_s: float, cost_s: float, restart_s: float, work_s: float
) -> None:
    saves = strategies.RecoveryJob(
        mtbf_s=mtbf_s, interval_s=interval_s, cost_s=cost_s, detect_s=DETECT_S
    )
    one = job(
        interval_s, cost_s, work_s, node_rate=1 / mtbf_s / NODES, restart_s=(0.0, 0.0, restart_s)
    )
    agree(one, strategies.checkpoint_restart(saves, restart_s), {"restart"})


@pytest.mark.parametrize(("mtbf_s", "interval_s", "cost_s", "restart_s", "work_s"), GRID)
def test_rolls_back_in_memory_first(
    mtbf_s: float, interval_s: float, cost_s: float, restart_s: float, work_s: float
) -> None:
    saves = strategies.RecoveryJob(
        mtbf_s=mtbf_s, interval_s=interval_s, cost_s=cost_s, snapshots=4,
        snapshot_cost_s=cost_s / 10, detect_s=DETECT_S,
    )  # fmt: skip
    one = job(
        interval_s, cost_s, work_s, versions=4, memory_cost_s=cost_s / 10, copies=NODES,
        node_rate=0.7 / mtbf_s / NODES, software_rate=0.3 / mtbf_s, node_from=MEMORY,
        restart_s=(0.0, restart_s / 5, restart_s),
    )  # fmt: skip
    exact = strategies.peer_memory(saves, restart_s / 5, restart_s, 0.3)
    agree(one, exact, {"rollback", "restart"})


@pytest.mark.parametrize(("mtbf_s", "interval_s", "cost_s", "restart_s", "work_s"), GRID)
def test_replaces_from_a_replica(
    mtbf_s: float, interval_s: float, cost_s: float, restart_s: float, work_s: float
) -> None:
    saves = strategies.RecoveryJob(
        mtbf_s=mtbf_s, interval_s=interval_s, cost_s=cost_s, detect_s=DETECT_S
    )
    one = job(
        interval_s, cost_s, work_s, replicas=NODES, node_from=LIVE,
        node_rate=0.8 / mtbf_s / NODES, software_rate=0.2 / mtbf_s,
        restart_s=(restart_s / 3, 0.0, restart_s),
    )  # fmt: skip
    exact = strategies.migrate(saves, restart_s / 3, restart_s, 0.2)
    agree(one, exact, {"replace", "restart"})
