"""Comparison of all strategies on one scenario, simulated on the same failures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import asdict

from outlast.plan.answers.run_comparison import RunComparison, compare_run
from outlast.plan.answers.run_distribution import Z_MAX, usd_per_s
from outlast.plan.model.answer_values import CAUSES, Answer, Cause, How, Quantity, answer
from outlast.plan.model.ladder_costs import STRATEGIES, Strategy, matters
from outlast.plan.model.measured_run import MeasuredRun
from outlast.plan.model.scenario import Scenario
from outlast.plan.model.strategy_prediction import (
    GOODPUT_MIN,
    Prediction,
    at_other_rate,
    predict,
    reason_impossible,
    tuned_job,
)
from outlast.plan.simulate.replications import (
    ENSEMBLE_FAILURES_MAX,
    HERE,
    STRATA,
    Draw,
    Ensemble,
    EnsembleRuns,
    affordable,
    band,
    draws,
    expected_failures,
    run_ensemble,
)
from outlast.plan.simulate.simulated_job import SimulatedJob, job_of
from outlast.process_pool import PartExecutor
from outlast.theory import strategies as theory

LONG_RUN = (
    "theory describes a long run, which lacks nodes from the start; a simulated run begins with"
    " all its spares and replicas"
)


class ComparisonRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a comparison.

    `replications` of each strategy, rounded up to whole rounds; None: as many as some seconds
    allow. `within_s`: time limit whose probability is computed.
    """

    seed: int = 0
    replications: int | None = None
    start: datetime | None = None
    within_s: float | None = None


class TheoryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the closed forms at the mean rate, and their error against simulated runs.

    The error is the mean by which runs took longer than predicted at the rate that each met (0.01:
    one per cent), with its `z` in standard errors. None where theory predicts no end at any rate.
    """

    goodput: float
    takes_s: float
    how: How
    differs: float | None
    z: float | None


class FinishDates(NamedTuple):
    """Finish dates; None for a run without end."""

    low: datetime | None
    middle: datetime | None
    high: datetime | None


class ComparedStrategy(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy. Quantities are medians, their bands P5 to P95 of the runs.

    `shares` of wall time are means. `endless`: the share of runs without end; `in_time`: the share
    that ends within the limit. `dearer`: cost beyond the best strategy on the same failures, where
    one of the two ends.
    """

    strategy: Strategy
    interval_s: float
    memory_interval_s: float | None
    spares: int
    goodput: Quantity
    takes: Quantity
    costs: Quantity
    dearer: Quantity
    failures: Quantity
    shares: dict[Cause, float]
    endless: float
    finish: FinishDates | None
    in_time: float | None
    theory: TheoryFigures


class ImpossibleStrategy(msgspec.Struct, frozen=True):
    """A strategy that is impossible in this scenario, with the reason."""

    strategy: Strategy
    why: str


class StrategyComparison(Answer, frozen=True, kw_only=True):
    """The strategies, cheapest first: `runs` of each, at so many `rates` of failure."""

    seed: int
    runs: int
    rates: int
    interrupted: bool
    within_s: float | None
    contenders: list[ComparedStrategy]
    impossible: list[ImpossibleStrategy]
    observed: RunComparison | None = None


def compare(
    scenario: Scenario,
    request: ComparisonRequest,
    *,
    measured: MeasuredRun | None = None,
    place: PartExecutor = HERE,
    on_progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> StrategyComparison:
    """Compare all possible strategies, and a measured run with its prediction.

    Intervals and spares are the best for the mean failure rate, at each rate, because the true one
    is unknown when a run begins. After Ctrl-C the answer covers what is done. Raises UsageError
    naming the invalid field.
    """
    predicted: dict[Strategy, Prediction] = {
        strategy: predict(scenario, strategy)
        for strategy in STRATEGIES
        if not reason_impossible(scenario, strategy)
    }
    ensemble = simulate_strategies(scenario, list(predicted), request, place, on_progress)
    usd: dict[Strategy, np.ndarray] = {
        run: usd_per_s(scenario, predicted[run].spares) * runs.wall_s
        for run, runs in ensemble.runs.items()
    }
    ranked: list[Strategy] = []
    if ensemble.draws:
        ranked = sorted(predicted, key=lambda name: (*_rank(usd[name]), -STRATEGIES.index(name)))
    contenders = [
        _compared_strategy(scenario, request, predicted[strategy], ensemble, usd, ranked[0])
        for strategy in ranked
    ]
    about = {"gpu-hour"}.union(*(matters(strategy) for strategy in predicted))
    question = f"Which strategy for {scenario.gpus:,} GPUs?"
    return StrategyComparison(
        **asdict(answer(question, scenario, [], _warnings(contenders, predicted), about)),
        seed=request.seed,
        runs=len(ensemble.draw_of),
        rates=len({d.factor for d in ensemble.draws}),
        interrupted=ensemble.interrupted,
        within_s=request.within_s,
        contenders=contenders,
        impossible=[
            ImpossibleStrategy(strategy, why)
            for strategy in STRATEGIES
            if (why := reason_impossible(scenario, strategy))
        ],
        observed=compare_run(scenario, measured, seed=request.seed) if measured else None,
    )


def simulate_strategies(
    scenario: Scenario,
    strategies: list[Strategy],
    request: ComparisonRequest,
    place: PartExecutor = HERE,
    on_progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Ensemble:
    """Simulate these strategies with the requested number of runs."""
    jobs: dict[Strategy, SimulatedJob] = {
        strategy: job_of(scenario, strategy) for strategy in strategies
    }
    if request.replications is not None:
        each = math.ceil(request.replications / STRATA)
    else:
        tuned: dict[Strategy, theory.RecoveryJob] = {
            strategy: tuned_job(scenario, strategy) for strategy in strategies
        }
        each = affordable(scenario, tuned, scenario.work_s)
    return run_ensemble(
        jobs, draws(scenario, each), seed=request.seed, place=place, on_progress=on_progress
    )


def expected_simulated_failures(scenario: Scenario, replications: int | None) -> float:
    """Return a rough number of failures to simulate; 0 if seconds suffice."""
    jobs = [
        job_of(scenario, strategy)
        for strategy in STRATEGIES
        if not reason_impossible(scenario, strategy)
    ]
    each = sum(min(ENSEMBLE_FAILURES_MAX, expected_failures(job)) for job in jobs)
    return (replications or 0) * each


def shares_of(runs: EnsembleRuns) -> dict[Cause, float]:
    """Return the mean shares of a run's time by cause."""
    means = (runs.spent_s / runs.spent_s.sum(axis=0)).mean(axis=1)
    return dict(zip(CAUSES, means.tolist(), strict=True))


def _rank(usd: np.ndarray) -> tuple[float, float]:
    """Return the sort key: the median, or where it is no number the share of runs that end."""
    return float(np.quantile(usd, 0.5, method="inverted_cdf")), -float(np.isfinite(usd).mean())


def _compared_strategy(
    scenario: Scenario,
    request: ComparisonRequest,
    predicted: Prediction,
    ensemble: Ensemble,
    usd: Mapping[Strategy, np.ndarray],
    best: Strategy,
) -> ComparedStrategy:
    strategy = predicted.strategy
    runs = ensemble.runs[strategy]
    takes = band("takes", "s", runs.wall_s)
    either = np.isfinite(usd[strategy]) | np.isfinite(usd[best])
    more = usd[strategy][either] - usd[best][either] if either.any() else np.zeros(1)
    return ComparedStrategy(
        strategy=strategy,
        interval_s=predicted.interval_s,
        memory_interval_s=predicted.memory_interval_s,
        spares=predicted.spares,
        goodput=band("goodput", "share", scenario.work_s / runs.wall_s),
        takes=takes,
        costs=band("costs", "USD", usd[strategy]),
        dearer=band("costs more", "USD", more, f"than {best}, on the same failures"),
        failures=band("failures", "times", runs.failures),
        shares=shares_of(runs),
        endless=float(np.isinf(runs.wall_s).mean()),
        finish=_finish(request.start, takes) if request.start else None,
        in_time=None
        if request.within_s is None
        else float((runs.wall_s <= request.within_s).mean()),
        theory=_theory(scenario, predicted, ensemble.draws, ensemble.draw_of, runs),
    )


def _finish(start: datetime, takes: Quantity) -> FinishDates:
    def date(wall_s: float | None) -> datetime | None:
        try:
            return start + timedelta(seconds=wall_s or 0.0)
        except OverflowError:  # infinity, and beyond the year 9999
            return None

    return FinishDates(date(takes.low), date(takes.value), date(takes.high))


def _theory(
    scenario: Scenario,
    predicted: Prediction,
    of: list[Draw],
    draw_of: np.ndarray,
    runs: EnsembleRuns,
) -> TheoryFigures:
    job = tuned_job(scenario, predicted.strategy)
    goodputs = [at_other_rate(d.scenario, predicted.strategy, job).goodput for d in of]
    last_s = (1 - job.drag) * job.flush_s  # of a run: its last save, until it can be restored
    with np.errstate(divide="ignore", over="ignore"):
        wall_s = (scenario.work_s / np.array(goodputs))[draw_of] + last_s
    ends = (wall_s < scenario.work_s / GOODPUT_MIN) & np.isfinite(runs.wall_s)
    over = runs.wall_s[ends] / wall_s[ends] - 1
    differs = None
    z = None
    if len(over) > 1:
        differs = float(over.mean())
        error = float(over.std()) / math.sqrt(len(over))
        z = differs / error if error else None
    return TheoryFigures(
        goodput=predicted.outcome.goodput,
        takes_s=predicted.wall_s,
        how=predicted.how,
        differs=differs,
        z=z,
    )


def _warnings(
    contenders: list[ComparedStrategy], predicted: Mapping[Strategy, Prediction]
) -> list[str]:
    strategies_by_text: dict[str, list[str]] = {}
    for contender in contenders:
        for text in predicted[contender.strategy].warnings:
            strategies_by_text.setdefault(text.partition(";")[0], []).append(contender.strategy)
    texts = [f"theory of {', '.join(names)}: {text}" for text, names in strategies_by_text.items()]
    if any(abs(contender.theory.z or 0.0) > Z_MAX for contender in contenders):
        texts.append(LONG_RUN)
    for row in contenders:
        if row.endless:
            some = "no run" if row.endless == 1 else f"{1 - row.endless:.0%} of runs"
            texts.append(
                f"{row.strategy}: {some} will end within {1 / GOODPUT_MIN:,.0f} times its work;"
                " failures come faster than the others make progress"
            )
    return texts
