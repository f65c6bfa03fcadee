"""Random scenarios over the whole field space, and their simulated results."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import numpy as np

from outlast.errors import ConfigError
from outlast.plan.model.ladder_costs import STRATEGIES, Strategy
from outlast.plan.model.scenario import Scenario, scenario_of
from outlast.plan.model.strategy_prediction import Prediction, predict, reason_impossible
from outlast.plan.simulate.replications import ReplicationPart, run_part
from outlast.plan.simulate.simulated_job import bound_failures, job_of

FAILURES = 200_000  # simulated for each scenario, so that its error is some tenths of a per cent
RUNS_LEAST, RUNS_MOST = 24, 4000
TOO_MANY = 1_000_000  # failures of one run
FAILURES_OF_A_RUN = 40_000


class Drawn(NamedTuple):
    """A valid scenario, a strategy for it, and its closed form."""

    fields: dict[str, str]
    scenario: Scenario
    strategy: Strategy
    predicted: Prediction


class Runs(NamedTuple):
    """Mean wall time of simulated runs, and its standard error."""

    wall_s: float
    error_s: float


def draw(seed: int) -> Drawn | None:
    """Return the scenario of this seed; None where its fields contradict each other."""
    rng = random.Random(seed)
    fields = _fields(rng)
    strategy = rng.choice(STRATEGIES)
    try:
        scenario = scenario_of(fields)
    except ConfigError:
        return None
    if reason_impossible(scenario, strategy):
        return None
    return Drawn(fields, scenario, strategy, predict(scenario, strategy))


def can_be_simulated(of: Drawn) -> bool:
    """Return whether a run ends within TOO_MANY failures."""
    failures = of.predicted.outcome.failures_per_s * of.predicted.wall_s
    return math.isfinite(of.predicted.wall_s) and failures <= TOO_MANY


def simulate(of: Drawn, failures: int = FAILURES) -> Runs:
    """Simulate some `failures`, in runs of the whole scenario."""
    job = bound_failures(job_of(of.scenario, of.strategy), of.predicted)
    each = max(1.0, of.predicted.outcome.failures_per_s * of.predicted.wall_s)
    runs = int(min(RUNS_MOST, max(RUNS_LEAST, failures / each)))
    wall_s = run_part(ReplicationPart(job, 5, 0, runs))["wall_s"]
    assert np.isfinite(wall_s).all(), of.fields
    return Runs(float(wall_s.mean()), float(wall_s.std()) / math.sqrt(runs))


def _between(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _seconds(rng: random.Random, low: float, high: float) -> str:
    return f"{_between(rng, low, high):.3f}s"


def _fields(rng: random.Random) -> dict[str, str]:
    per_node = rng.choice([1, 4, 8, 8, 16])
    nodes = round(_between(rng, 1, 20_000))
    if rng.random() < 0.7:
        nodes = max(12, nodes // 12 * 12)
    mtbf_s = _between(rng, 60, 30 * 86400)
    transient = rng.choice([0.0, 20.0, 50.0, 100.0, 90 * rng.random()])
    fatal = rng.choice([0.0, 0.0, 1.0, 10.0, (100 - transient) * rng.random()])
    work_s = min(_between(rng, 3600, 1000 * 86400), FAILURES_OF_A_RUN * mtbf_s)
    fields = {
        "gpus": f"{nodes * per_node}",
        "gpus-per-node": f"{per_node}",
        "failures": f"{mtbf_s * nodes * per_node:.6f}s",
        "work": f"{work_s:.3f}s",
        "transient": f"{transient:.4f}%",
        "fatal": f"{fatal:.4f}%",
        "repair": _seconds(rng, 60, 3 * 86400),
        "spares": rng.choice(["enough", "enough", "0", "1", "2", f"{_between(rng, 1, 300):.0f}"]),
        "cost": _seconds(rng, 0.1, 600),
        "memory-cost": _seconds(rng, 0.05, 30),
        "window": _seconds(rng, 1, 1800),
        "detect": _seconds(rng, 0.5, 600),
        "restart": _seconds(rng, 5, 3600),
        "restore": _seconds(rng, 2, 900),
        "pause": _seconds(rng, 0.5, 300),
        "step": _seconds(rng, 0.2, 60),
    }
    sizes = [size for size in range(1, nodes + 1) if nodes % size == 0]
    others = {
        "flush": (0.7, _seconds(rng, 1, 1800)),
        "drag": (0.3, f"{rng.uniform(0, 50):.2f}%"),
        "interval": (0.5, _seconds(rng, 30, 6 * 3600)),
        "memory-interval": (0.3, _seconds(rng, 10, 3600)),
        "replica-gpus": (0.7, f"{rng.choice(sizes) * per_node}"),
        "copies": (0.5, f"{rng.choice([size for size in sizes if size <= 8])}"),
        "overhead": (0.1, f"{','.join(f'{one}={rng.uniform(0, 60):.2f}%' for one in STRATEGIES)}"),
        "gap-spread": (0.05, f"{rng.uniform(0, 100):.2f}%"),
        "rack-mtbf": (0.05, _seconds(rng, 86400, 1000 * 86400)),
        "lemons": (0.05, f"{rng.uniform(0.1, 20):.2f}%"),
        "shape": (0.05, f"{rng.uniform(0.4, 2):.2f}"),
    }
    for key, (probability, text) in others.items():
        if rng.random() < probability:
            fields[key] = text
    return fields
