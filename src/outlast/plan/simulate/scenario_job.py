"""Simulated job of a strategy on a scenario."""

from __future__ import annotations

import math

from outlast.plan.model.ladder_costs import (
    Strategy,
    fatal_rate_per_s,
    node_rate_per_s,
    pace_of,
    sources,
    spares_of,
    stays_share,
)
from outlast.plan.model.scenario import NEVER_S, Scenario
from outlast.plan.model.strategy_prediction import Prediction, tuned_job
from outlast.plan.simulate.simulated_job import LIVE, MEMORY, RANDOM, STORAGE, SimulatedJob
from outlast.theory.strategies import DEPTHS

ENDLESS_TIMES, ENDLESS_MIN = 20, 100_000
FAILURES_MAX = 20_000_000  # of a replication; a run with more is called endless


def job_of(scenario: Scenario, strategy: Strategy) -> SimulatedJob:
    """Return the job with the intervals of `predict`. Raises UsageError with the invalid field."""
    saves = tuned_job(scenario, strategy)
    node_rate = node_rate_per_s(scenario)
    lemonade = 1 + scenario.lemons * (scenario.lemon_factor - 1)
    racks = scenario.rack_mtbf_s < NEVER_S
    scale_s = 1 / node_rate / math.gamma(1 + 1 / scenario.shape) if node_rate else 0.0
    first = sources(scenario, strategy, memory=saves.snapshots > 0)[0][0]
    best = (LIVE, MEMORY, STORAGE)[DEPTHS.index(first)]
    return SimulatedJob(
        work_s=scenario.work_s,
        interval_s=saves.interval_s,
        versions=max(1, saves.snapshots),
        step_s=scenario.step_s,
        memory_cost_s=saves.snapshot_cost_s,
        cost_s=saves.cost_s + saves.drag * saves.flush_s,
        flush_s=(1 - saves.drag) * saves.flush_s,  # its slowness is in the cost
        nodes=scenario.nodes,
        spares=spares_of(scenario, strategy),
        replicas=scenario.replicas if best == LIVE else 1,
        copies=scenario.copies if saves.snapshots else 0,
        window_s=scenario.window_s,
        node_rate=node_rate / lemonade,
        kept=stays_share(scenario),
        lemons=scenario.lemons,
        lemon_factor=scenario.lemon_factor,
        mended=0.0,
        software_rate=fatal_rate_per_s(scenario),
        rack_rate=1 / scenario.rack_mtbf_s,
        rack_nodes=min(scenario.rack_nodes, scenario.nodes) if racks else 1,
        shape=scenario.shape if node_rate else 1.0,
        scale_s=scale_s * lemonade,
        age_s=scenario.age_s,
        repair_s=scenario.repair_s,
        repair_shape=1.0,
        detect_s=scenario.detect_s,
        restart_s=(scenario.pause_s, scenario.restore_s, scenario.restart_s),
        software_from=STORAGE,
        node_from=best,
        drop=strategy == "drop",
        failures_max=FAILURES_MAX,
        pace=pace_of(scenario, strategy),
        gap_spread=RANDOM if scenario.gap_spread is None else scenario.gap_spread,
    )


def bound_failures(job: SimulatedJob, predicted: Prediction) -> SimulatedJob:
    """Limit a job's failures far above theory's number, to detect runs that never end."""
    expected = predicted.outcome.failures_per_s * predicted.wall_s
    bound = ENDLESS_MIN if math.isinf(expected) else max(ENDLESS_MIN, ENDLESS_TIMES * expected)
    return job._replace(failures_max=min(job.failures_max, int(bound)))
