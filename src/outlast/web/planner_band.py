"""Simulated band of the planner: goodput of runs of one strategy over the places of a curve."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from outlast.errors import UsageError
from outlast.plan.model.ladder_costs import Strategy
from outlast.plan.model.scenario import Scenario
from outlast.plan.model.strategy_prediction import reason_impossible

SEED = 0
RUNS_A_STRATUM = (3, 16)  # of each of 16 parts of the failure rate's distribution
FAILURES = 100_000  # of a place; more runs only while they have no more failures
PLACES_KEPT = 512


class SimulatedGoodput(NamedTuple):
    """Goodput of `runs` simulated runs: median, P5 and P95."""

    low: float
    middle: float
    high: float
    runs: int


class PlannerBand(NamedTuple):
    """Simulated goodput by the text of its place."""

    strategy: Strategy
    simulated: Mapping[str, SimulatedGoodput]


@lru_cache(PLACES_KEPT)
def simulated_goodput(scenario: Scenario, strategy: Strategy) -> SimulatedGoodput | None:
    """Simulate runs of a scenario, at most a million failures; None where it is impossible.

    Each rate of the failure rate's band is met by as many runs. Longer runs are extrapolated, as
    in `outlast plan compare`. Raises ModuleNotFoundError without Numba.
    """
    from outlast.plan.simulate.replications import (
        ENSEMBLE_FAILURES_MAX,
        STRATA,
        band,
        draws,
        expected_failures,
        run_ensemble,
    )
    from outlast.plan.simulate.simulated_job import job_of

    try:
        if reason_impossible(scenario, strategy):
            return None
        job = job_of(scenario, strategy)
        failures = max(1.0, min(ENSEMBLE_FAILURES_MAX, expected_failures(job)))
        least, most = RUNS_A_STRATUM
        runs = max(least, min(most, int(FAILURES / STRATA / failures)))
        found = run_ensemble({strategy: job}, draws(scenario, runs), seed=SEED).runs[strategy]
    except UsageError:  # a field that the simulator refuses
        return None
    goodput = band("goodput", "share", scenario.work_s / found.wall_s)
    assert goodput.low is not None and goodput.high is not None
    return SimulatedGoodput(goodput.low, goodput.value, goodput.high, len(found.wall_s))
