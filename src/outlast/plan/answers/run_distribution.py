"""Statistics of many simulated runs in bounded memory: mean, error and quantiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import closing

import msgspec
import numpy as np
from msgspec.structs import asdict, replace

from outlast.errors import OutlastError
from outlast.plan.model.answer_values import HIGH, LOW, Answer, Unit, answer
from outlast.plan.model.ladder_costs import Strategy, matters
from outlast.plan.model.scenario import Scenario
from outlast.plan.model.strategy_prediction import Prediction, cost_usd, predict
from outlast.plan.simulate.simulated_job import TALLIES, SimulatedJob, bound_failures, job_of
from outlast.process_pool import IN_FLIGHT

Z_MAX = 4.0
DIFFERS_MIN = 0.01


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of all runs, with theory's mean and the difference in standard errors.

    Mean and its standard error, P5, median and P95. None where there is no such figure.
    """

    name: str
    unit: Unit
    mean: float
    error: float | None
    low: float
    middle: float
    high: float
    predicted: float | None = None
    z: float | None = None

    def differs(self) -> float:
        """Share by which the mean exceeds theory's; 0 where that may be chance or is below 1 %."""
        if not self.z or not self.predicted or abs(self.z) < Z_MAX:
            return 0.0
        share = self.mean / self.predicted - 1
        return share if abs(share) > DIFFERS_MIN else 0.0


def tally(
    name: str,
    unit: Unit,
    of: StreamingSummary,
    predicted: float | None = None,
    *,
    times: float = 1.0,
) -> Tally:
    """Return the statistics; `times` converts the summed values to `unit`."""
    mean = times * of.mean
    error = None if math.isnan(of.error) else times * of.error
    z = None
    if predicted is not None and error and math.isfinite(predicted):
        z = (mean - predicted) / error
    low, middle, high = (times * of.quantile(share) for share in (LOW, 0.5, HIGH))
    return Tally(
        name=name,
        unit=unit,
        mean=mean,
        error=error,
        low=low,
        middle=middle,
        high=high,
        predicted=predicted,
        z=z,
    )


def usd_per_s(scenario: Scenario, spares: int) -> float:
    """Return the price of a second of the run, spares included."""
    return cost_usd(scenario, 1.0, spares)


def without_advice(warnings: list[str]) -> list[str]:
    """Return theory's warnings without the advice to simulate, which is done here."""
    return [text.partition("; `outlast")[0] for text in warnings]


_KEPT_BITS = 11
ACCURACY = 2.0**-_KEPT_BITS  # relative, of a quantile
_SHIFT = 52 - _KEPT_BITS


class StreamingSummary:
    """Summary of a column of non-negative numbers; infinity is one of them.

    Values that agree in their exponent and its next 11 bits are counted together, and stand for
    their mean: a quantile is within ACCURACY of the true one, and exact for whole numbers below
    4,096. Each doubling of the largest over the smallest costs 48 kB at most.
    """

    def __init__(self) -> None:
        self.count = 0
        self.endless = 0
        self._mean = 0.0
        self._squares = 0.0
        self._keys = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._sums = np.empty(0)

    def add(self, values: np.ndarray) -> None:
        """Add values; infinite ones are counted as runs without end."""
        values = np.ascontiguousarray(values, np.float64)
        ended = values[np.isfinite(values)]
        before = self.count - self.endless
        count = len(ended)
        self.count += len(values)
        self.endless += len(values) - count
        if count:  # Chan, Golub and LeVeque's: two samples' moments give those of both
            mean = float(ended.mean())
            total = before + count
            shift = mean - self._mean
            self._squares += float(((ended - mean) ** 2).sum()) + shift**2 * before * count / total
            self._mean += shift * count / total
        keys = np.concatenate((self._keys, values.view(np.int64) >> _SHIFT))
        ones = np.ones(len(values), np.int64)
        self._keys, where = np.unique(keys, return_inverse=True)
        self._counts = _by_key(where, np.concatenate((self._counts, ones))).astype(np.int64)
        self._sums = _by_key(where, np.concatenate((self._sums, values)))

    @property
    def mean(self) -> float:
        """Return the mean; infinity where one value is; NaN if there are no values."""
        return math.inf if self.endless else self._mean if self.count else math.nan

    @property
    def error(self) -> float:
        """Return the standard error of the mean; NaN where there is none."""
        if self.endless or self.count < 2:
            return math.nan
        return math.sqrt(self._squares / (self.count - 1) / self.count)

    def quantile(self, probability: float) -> float:
        """Return the smallest value not below this share of all values; NaN if there are none."""
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(probability * self.count))
        at = int(np.searchsorted(np.cumsum(self._counts), rank))
        return float(self._sums[at] / self._counts[at])


def _by_key(where: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.bincount(where, weights=weights)


LONG_RUN = "drop: theory describes a long run; a simulated one begins with all its replicas"
_TALLIES: dict[str, tuple[str, Unit]] = {
    "wall_s": ("takes", "s"),
    "redo_s": ("redone work", "s"),
    "save_s": ("saving", "s"),
    "detect_s": ("detection", "s"),
    "restart_s": ("restart", "s"),
    "wait_s": ("waiting", "s"),
    "slow_s": ("slowness", "s"),
    "failures": ("failures", "times"),
    "incidents": ("stops", "times"),
    "from_live": ("from live state", "times"),
    "from_memory": ("from memory", "times"),
    "from_storage": ("from storage", "times"),
    "stalls": ("waits", "times"),
}


class RunDistribution(Answer, frozen=True, kw_only=True):
    """Quantiles of simulated runs.

    `replications` of `requested` were done; `unfinished` of them did not end.
    """

    strategy: Strategy
    seed: int
    requested: int = msgspec.field(name="asked")
    replications: int
    unfinished: int
    interrupted: bool
    interval_s: float
    memory_interval_s: float | None
    spares: int
    tallies: list[Tally]


def run_distribution(
    scenario: Scenario,
    strategy: Strategy,
    replications: int,
    *,
    seed: int = 0,
    executor: Executor | None = None,
    in_flight: int = IN_FLIGHT,
    on_rows: Callable[[np.ndarray], None] = lambda _: None,
) -> RunDistribution:
    """Simulate runs of one strategy and return their quantiles.

    Memory does not grow with `replications`: `on_rows` receives the rows (replications.ROWS) in
    order, and they are discarded. After Ctrl-C the answer covers the first runs. Raises UsageError
    naming the invalid field, OutlastError where a part failed.
    """
    from outlast.plan.simulate.replications import parts, reason, results  # needs Numba

    predicted = predict(scenario, strategy)
    job = bound_failures(job_of(scenario, strategy), predicted)
    wanted = ((None, part) for part in parts(job, replications, seed))
    summaries = {name: StreamingSummary() for name in (*TALLIES, "goodput")}
    with closing(results(wanted, executor, in_flight)) as done:
        for _, part, rows in done:
            if isinstance(rows, Exception):
                context = f"replications from {part.first:,} failed; no results were kept: "
                raise OutlastError(context + reason(rows)) from rows
            for name in TALLIES:
                summaries[name].add(rows[name])
            summaries["goodput"].add(job.work_s / rows["wall_s"])
            on_rows(rows)
    wall = summaries["wall_s"]
    tallies = _make_tallies(scenario, predicted, summaries) if wall.count else []
    warnings = _warnings(strategy, predicted, job, wall, tallies, replications)
    question = f"What do runs of {scenario.gpus:,} GPUs with {strategy} come to?"
    return RunDistribution(
        **asdict(answer(question, scenario, [], warnings, matters(strategy) | {"gpu-hour"})),
        strategy=strategy,
        seed=seed,
        requested=replications,
        replications=wall.count,
        unfinished=wall.endless,
        interrupted=wall.count < replications,
        interval_s=job.interval_s,
        memory_interval_s=predicted.memory_interval_s,
        spares=job.spares,
        tallies=tallies,
    )


def _make_tallies(
    scenario: Scenario, predicted: Prediction, summaries: dict[str, StreamingSummary]
) -> list[Tally]:
    theory = {"wall_s": predicted.wall_s}
    if predicted.strategy != "drop":  # where theory counts replicas that leave, not failures
        theory["failures"] = predicted.outcome.failures_per_s * predicted.wall_s
    tallies = [
        tally(label, unit, summaries[name], theory.get(name))
        for name, (label, unit) in _TALLIES.items()
    ]
    # A mean of goodputs is not the goodput of the mean time, which theory gives: no z.
    goodput = tally("goodput", "share", summaries["goodput"])
    costs = tally(
        "costs",
        "USD",
        summaries["wall_s"],
        predicted.usd,
        times=usd_per_s(scenario, predicted.spares),
    )
    plain = replace(goodput, predicted=predicted.outcome.goodput)
    return [tallies[0], plain, costs, *tallies[1:]]


def _warnings(
    strategy: Strategy,
    predicted: Prediction,
    job: SimulatedJob,
    wall: StreamingSummary,
    tallies: list[Tally],
    replications: int,
) -> list[str]:
    texts = without_advice(predicted.warnings) + [LONG_RUN] * (strategy == "drop")
    if wall.count < replications:
        texts.append(f"interrupted: the first {wall.count:,} of {replications:,} replications")
    if wall.endless:
        texts.append(
            f"{wall.endless:,} of {wall.count:,} runs have no end: {job.failures_max:,} failures"
            " came first, or no node would have returned"
        )
    differs = tallies[0].differs() if tallies else 0.0
    if differs:
        longer = "longer" if differs > 0 else "less"
        texts.append(f"simulated runs take {abs(differs):.1%} {longer} than theory predicts")
    return texts
