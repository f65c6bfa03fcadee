"""Ensembles: runs of several jobs with the same failures, at rates drawn from a distribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Literal, NamedTuple, get_args

import msgspec
import numpy as np

from outlast.plan.model.answer_values import HIGH, LOW, Quantity, Unit, at_rate
from outlast.plan.model.ladder_costs import Strategy
from outlast.plan.model.rates import EXACT
from outlast.plan.model.scenario import Scenario
from outlast.plan.model.strategy_prediction import GOODPUT_MIN, at_other_rate
from outlast.plan.simulate.replications import ROWS, ReplicationPart, results
from outlast.plan.simulate.simulated_job import SimulatedJob, check_job
from outlast.process_pool import PartExecutor
from outlast.theory import strategies

STRATA = 16
ROUNDS = 8  # rates in each stratum
RUNS_A_RATE = 64  # at most: then there are more rates
GOLDEN = (math.sqrt(5) - 1) / 2
ENSEMBLE_FAILURES_MAX = 20_000  # of a run; its progress by then is extrapolated
FAILURES = 4_000_000  # that some seconds simulate
# Runs in a stratum.
RUNS_MIN = 3
RUNS_MAX = 256
HERE = PartExecutor(None, 1)
Cause = Literal["work", "save", "redo", "detect", "restart", "wait", "slow"]
CAUSES: tuple[Cause, ...] = get_args(Cause)


class Draw(NamedTuple):
    """A drawn failure rate, as a scenario with it and relative to the mean rate.

    `runs` runs meet it, from `first` on.
    """

    scenario: Scenario
    factor: float
    first: int
    runs: int


class EnsembleRuns(msgspec.Struct, frozen=True):
    """Runs of one job, an entry each.

    `wall_s` is infinity where a run does not end; the seconds in `spent_s` (by CAUSES) are those
    simulated, and add up to wall where a run ended within FAILURES_MAX.
    """

    wall_s: np.ndarray
    failures: np.ndarray
    spent_s: np.ndarray
    capped: np.ndarray


class Ensemble(msgspec.Struct, frozen=True):
    """Runs of all jobs; the k-th runs meet the same failures, at the rate `draw_of[k]`."""

    draws: list[Draw]
    draw_of: np.ndarray
    runs: dict[Strategy, EnsembleRuns]
    interrupted: bool


def draws(scenario: Scenario, runs_a_stratum: int) -> list[Draw]:
    """Return equally likely rates, in rounds of one from each sixteenth of the distribution.

    The first rounds alone are therefore nearly representative.
    """
    rounds = max(min(runs_a_stratum, ROUNDS), math.ceil(runs_a_stratum / RUNS_A_RATE))
    runs = math.ceil(runs_a_stratum / rounds)
    found: list[Draw] = []
    for number in range(rounds):
        inside = (0.5 + number * GOLDEN) % 1
        for stratum in range(STRATA):
            here = scenario
            if scenario.failures.weight_failures != EXACT:
                here = at_rate(scenario, (stratum + inside) / STRATA)
            factor = here.failures.per_gpu_s / scenario.failures.per_gpu_s
            found.append(Draw(here, factor, len(found) * runs, runs))
    return found


def affordable(
    scenario: Scenario, tuned: Mapping[Strategy, strategies.RecoveryJob], work_s: float
) -> int:
    """Return the runs in a stratum that take some seconds, by theory's number of failures."""
    each = sum(
        min(ENSEMBLE_FAILURES_MAX, met.failures_per_s * work_s / max(met.goodput, GOODPUT_MIN))
        for draw in draws(scenario, 1)
        for name, job in tuned.items()
        for met in [at_other_rate(draw.scenario, name, job)]
    )
    found = min(RUNS_MAX, max(RUNS_MIN, int(FAILURES / max(1.0, each))))
    return found if found < ROUNDS else found - found % ROUNDS


def at_factor(job: SimulatedJob, factor: float) -> SimulatedJob:
    """Return the job with GPU and software failure rates times `factor`; racks keep theirs."""
    return job._replace(
        node_rate=job.node_rate * factor,
        software_rate=job.software_rate * factor,
        scale_s=job.scale_s / factor,
    )


def run_ensemble(
    jobs: Mapping[Strategy, SimulatedJob],
    of: list[Draw],
    *,
    seed: int = 0,
    place: PartExecutor = HERE,
    on_progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Ensemble:
    """Simulate each of `jobs`, tuned for the mean rate, at each rate.

    `on_progress` receives the number of parts done, and of all. After Ctrl-C the result has the
    complete rounds. Raises UsageError naming the invalid field of a job.
    """
    for job in jobs.values():
        check_job(job)
    done: dict[Strategy, list[np.ndarray]] = {name: [] for name in jobs}
    whole = len(of) * len(jobs)
    with closing(results(_parts(jobs, of, seed), *place)) as found:
        for number, (name, _, rows) in enumerate(found, 1):
            if isinstance(rows, Exception):
                raise rows
            done[name].append(rows)
            on_progress(number, whole)
    finished = min(len(parts) for parts in done.values())
    kept = finished if finished == len(of) else finished // STRATA * STRATA
    return Ensemble(
        of[:kept],
        np.repeat(np.arange(kept), [one.runs for one in of[:kept]]),
        {
            name: of_rows(jobs[name], np.concatenate([*parts[:kept], np.empty(0, ROWS)]))
            for name, parts in done.items()
        },
        interrupted=finished < len(of),
    )


def band(name: str, unit: Unit, values: np.ndarray, source: str = "") -> Quantity:
    """Return the median of simulated values, with P5 and P95.

    Each is one of the values, not an interpolation, since some may be infinite.
    """
    low, middle, high = np.quantile(values, (LOW, 0.5, HIGH), method="inverted_cdf")
    return Quantity(
        name=name,
        value=float(middle),
        unit=unit,
        low=float(low),
        high=float(high),
        how="simulated",
        source=source,
    )


def _parts(
    jobs: Mapping[Strategy, SimulatedJob], of: list[Draw], seed: int
) -> Iterator[tuple[Strategy, ReplicationPart]]:
    for draw in of:
        for name, job in jobs.items():
            here = at_factor(job, draw.factor)._replace(failures_max=ENSEMBLE_FAILURES_MAX)
            yield name, ReplicationPart(here, seed, draw.first, draw.runs)


def of_rows(job: SimulatedJob, rows: np.ndarray) -> EnsembleRuns:
    """Summarise rows of a job that was ended after FAILURES_MAX failures."""
    names = ["done_s" if cause == "work" else f"{cause}_s" for cause in CAUSES]
    spent_s = np.stack([rows[name] for name in names])
    elapsed_s = spent_s.sum(axis=0)
    capped = np.isinf(rows["wall_s"])
    with np.errstate(divide="ignore"):
        scale = np.where(capped, job.work_s / rows["done_s"], 1.0)
    wall_s = np.where(capped, elapsed_s * scale, rows["wall_s"])
    wall_s[wall_s > job.work_s / GOODPUT_MIN] = math.inf
    return EnsembleRuns(wall_s, rows["failures"] * scale, spent_s, capped)
