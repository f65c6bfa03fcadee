"""Price of a strategy, simulated where no formula holds."""

from __future__ import annotations

import math
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

from msgspec.structs import replace

from outlast.plan.model.answer_values import CAUSES, Cause
from outlast.plan.model.ladder_costs import Strategy, mtbf_s, sources
from outlast.plan.model.scenario import Scenario
from outlast.plan.model.strategy_prediction import GOODPUT_MIN, Prediction, cost_usd, predict
from outlast.theory import intervals
from outlast.theory.strategies import RecoveryOutcome

FIRST = 20_000  # failures that a first look simulates
MANY = 150_000  # failures that an accurate price simulates
FAR = 1.3  # times another price: so far from it a first look is enough
RUNS_MAX = 64
CACHED_PRICES = 4096


class _SimulatedPrice(NamedTuple):
    """Means over simulated runs.

    Wall time (infinite where a run does not end), price of a second, failures, falls back to
    storage, and the share of each of `replications.CAUSES`.
    """

    wall_s: float
    failures_per_s: float
    falls_per_s: float
    shares: dict[Cause, float]

    @property
    def between_falls_s(self) -> float:
        """Return the seconds between restarts from storage, for a job at full speed.

        A slower job restarts more often in the same work, and repeats work more slowly. Recoveries
        and waits lose no further work.
        """
        running = math.fsum(self.shares[cause] for cause in ("work", "save", "redo", "slow"))
        speed = self.shares["work"] / (self.shares["work"] + self.shares["slow"])
        return speed**2 * running / self.falls_per_s


def price_strategy(
    scenario: Scenario, strategy: Strategy, *, beside_usd: float = math.inf
) -> Prediction:
    """Return a prediction as `predict`, simulated outside a formula's regime (with Numba).

    Simulated at the interval for the observed rate of restarts from storage, with an error of some
    per cent. A price far above `beside_usd` is less precise.

    The same scenario has the same price, and all scenarios meet the same failures, so that chance
    does not affect differences between them. Raises UsageError naming the invalid field.
    """
    predicted = predict(scenario, strategy)
    if (
        predicted.outcome.in_regime
        or _is_hopeless(scenario, strategy)
        or find_spec("numba") is None
    ):
        return predicted
    met = _simulated_price(scenario, strategy, FIRST)
    if math.isinf(met.wall_s) or _usd(scenario, predicted, met) > FAR * beside_usd:
        return _simulated(scenario, predicted, met)
    open_ = scenario.interval_s is None and predicted.memory_interval_s is None
    if open_ and met.falls_per_s and math.isfinite(met.wall_s):
        best_s = _interval_s(scenario, met.between_falls_s)
        scenario = replace(scenario, interval_s=best_s)
        predicted = replace(predicted, interval_s=best_s)
    return _simulated(scenario, predicted, _simulated_price(scenario, strategy, MANY))


def _is_hopeless(scenario: Scenario, strategy: Strategy) -> bool:
    """Return whether no run ends at any save interval.

    The job works for M on the average, and its shortest recovery L takes M (e^(L/M) - 1), so that
    goodput is at most e^(-L/M). Dropped replicas do not fail, and are no such case.
    """
    if strategy == "drop":
        return False
    shortest_s = min(takes for _, takes in sources(scenario, strategy, memory=True))
    return math.exp(-(scenario.detect_s + shortest_s) / mtbf_s(scenario)) < GOODPUT_MIN


@lru_cache(CACHED_PRICES)
def _simulated_price(scenario: Scenario, strategy: Strategy, failures: int) -> _SimulatedPrice:
    # Only where it is needed: Numba and the compiled kernel take a second to load.
    from outlast.plan.simulate.replications import (
        ENSEMBLE_FAILURES_MAX,
        ReplicationPart,
        of_rows,
        run_part,
    )
    from outlast.plan.simulate.simulated_job import job_of

    job = job_of(scenario, strategy)._replace(failures_max=ENSEMBLE_FAILURES_MAX)
    first = run_part(ReplicationPart(job, 0, 0, 1))
    runs = math.ceil(failures / max(1.0, float(first["failures"][0])))
    rows = run_part(ReplicationPart(job, 0, 0, min(RUNS_MAX, runs)))
    summary = of_rows(job, rows)
    wall_s = float(summary.wall_s.mean())
    elapsed_s = summary.spent_s.sum(axis=0)
    # Scale the simulated part of each run to the whole run.
    whole = summary.wall_s / elapsed_s if math.isfinite(wall_s) else 1.0
    spent_s = (summary.spent_s * whole).sum(axis=1)
    falls = float(rows["from_storage"].sum() / elapsed_s.sum())
    shares = dict(zip(CAUSES, (spent_s / spent_s.sum()).tolist(), strict=True))
    often = float((rows["failures"] / elapsed_s).mean())
    return _SimulatedPrice(wall_s, often, falls, shares)


def _interval_s(scenario: Scenario, between_falls_s: float) -> float:
    best_s = intervals.optimum_async(
        scenario.cost_s, scenario.flush_s, between_falls_s, drag=scenario.drag
    )
    return min(max(best_s, scenario.flush_s, scenario.step_s), scenario.work_s)


def _usd(scenario: Scenario, predicted: Prediction, met: _SimulatedPrice) -> float:
    return cost_usd(scenario, met.wall_s, predicted.spares)


def _simulated(scenario: Scenario, predicted: Prediction, met: _SimulatedPrice) -> Prediction:
    of = met.shares
    outcome = RecoveryOutcome(
        goodput=of["work"],
        save=of["save"],
        redo=of["redo"],
        detect=of["detect"],
        recover=of["restart"],
        wait=of["wait"],
        degraded=of["slow"],
        recover_by_rung={},
        falls_back=met.falls_per_s / met.failures_per_s if met.failures_per_s else 0.0,
        failures_per_s=met.failures_per_s,
        exact=False,
        in_regime=True,
    )
    ends = outcome.goodput >= GOODPUT_MIN
    return replace(
        predicted,
        outcome=outcome,
        wall_s=met.wall_s if ends else math.inf,
        usd=_usd(scenario, predicted, met) if ends else math.inf,
        how="simulated",
        warnings=[],
    )
