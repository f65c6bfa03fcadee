"""Comparison of a real run with the prediction of one as long."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

from outlast.plan.model.answer_values import CAUSES, HIGH, LOW, YEAR_S, Quantity
from outlast.plan.model.ladder_costs import Strategy
from outlast.plan.model.measured_run import MeasuredRun
from outlast.plan.model.rates import EXACT, StatedFailures
from outlast.plan.model.scenario import Scenario
from outlast.plan.model.strategy_prediction import tuned_job
from outlast.plan.simulate.replications import (
    EnsembleRuns,
    affordable,
    at_factor,
    band,
    draws,
    run_ensemble,
)
from outlast.plan.simulate.simulated_job import SimulatedJob, job_of
from outlast.theory import failures, numerics, strategies

Verdict = Literal["within", "more", "less"]
CLOSE = 1e-9  # of rounding
RATE = "failures a GPU-year"


class ComparedFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, predicted and observed.

    `observed` has a band where it was counted. `at_its_rate`: predicted with the run's own failure
    rate; a remaining difference is not due to chance.
    """

    predicted: Quantity
    observed: Quantity
    verdict: Verdict
    at_its_rate: Quantity | None
    verdict_at_its_rate: Verdict | None


class RunComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of a run with its prediction.

    `believed`: the failure rate from the scenario's and the run's own failures together.
    """

    run_dir: str
    outcome: str
    strategy: Strategy
    devices: int
    steps: int
    wall_s: float
    outside_s: float
    goodput: float | None
    ettr: float | None
    incidents: dict[str, int]
    rows: list[ComparedFigure]
    believed: Quantity | None
    notes: list[str]


def compare_run(scenario: Scenario, of: MeasuredRun, *, seed: int = 0) -> RunComparison:
    """Compare a measured run with the prediction of a run that does as much work.

    Raises UsageError naming the field that cannot be.
    """
    summary = of.summary
    strategy: Strategy = "checkpoint-restart" if summary.restart_only else "outlast"
    rows = [_rate(scenario, of)]
    if of.work_s:
        job = job_of(scenario, strategy)._replace(work_s=of.work_s)
        tuned = tuned_job(scenario, strategy)
        runs = _runs(scenario, strategy, tuned, job, seed)
        again = None
        if of.failures:
            own = _at_its_rate(scenario, of)
            factor = own.failures.per_gpu_s / scenario.failures.per_gpu_s
            again = _runs(own, strategy, tuned, at_factor(job, factor), seed)
        rows += _shares(of, runs, again)
    return RunComparison(
        run_dir=summary.run_dir,
        outcome=summary.outcome,
        strategy=strategy,
        devices=summary.world,
        steps=summary.steps or 0,
        wall_s=summary.wall_s,
        outside_s=of.outside_s,
        goodput=summary.goodput,
        ettr=summary.ettr,
        incidents={kind: cause.count for kind, cause in summary.causes.items()},
        rows=rows,
        believed=_believed(scenario, of),
        notes=list(summary.notes),
    )


def _runs(
    scenario: Scenario,
    strategy: Strategy,
    tuned: strategies.RecoveryJob,
    job: SimulatedJob,
    seed: int,
) -> EnsembleRuns:
    each = affordable(scenario, {strategy: tuned}, job.work_s)
    rows = run_ensemble({strategy: job}, draws(scenario, each), seed=seed).runs[strategy]
    # A run ends with its last step, without the flush of the last save.
    rows.spent_s[CAUSES.index("save"), ~rows.capped] -= job.flush_s
    return rows


def _at_its_rate(scenario: Scenario, of: MeasuredRun) -> Scenario:
    rate = StatedFailures(
        name="observed",
        per_gpu_s=of.failures / of.exposure_s,
        source=of.summary.run_dir,
        weight_failures=float(of.failures),
    )
    return replace(scenario, failures=rate)


def _rate(scenario: Scenario, of: MeasuredRun) -> ComparedFigure:
    """Return the rate of counted failures, with Garwood's exact interval for a Poisson mean."""
    rate = scenario.failures
    count = of.failures
    sure = rate.weight_failures == EXACT
    predicted = Quantity(
        name=RATE,
        value=rate.per_gpu_s * YEAR_S,
        unit="times",
        how="given",
        source=rate.name,
        low=None if sure else rate.at(LOW) * YEAR_S,
        high=None if sure else rate.at(HIGH) * YEAR_S,
    )
    scale = YEAR_S / of.exposure_s
    observed = Quantity(
        name=RATE,
        value=count * scale,
        unit="times",
        how="given",
        source=f"{count} in the run",
        low=numerics.gamma_quantile(count, LOW) * scale if count else 0.0,
        high=numerics.gamma_quantile(count + 1, HIGH) * scale,
    )
    return _compared(predicted, observed, None)


def _believed(scenario: Scenario, of: MeasuredRun) -> Quantity | None:
    rate = scenario.failures
    if rate.weight_failures == EXACT:
        return None
    prior = failures.RatePrior(
        name=rate.name,
        rate_per_device_s=rate.per_gpu_s,
        source=rate.source,
        weight_failures=rate.weight_failures,
    )
    now = failures.posterior(prior, of.failures, of.exposure_s)
    return Quantity(
        name=RATE,
        value=now.mean * YEAR_S,
        unit="times",
        how="exact",
        low=now.low * YEAR_S,
        high=now.high * YEAR_S,
        source=f"{rate.name}, and the run's own failures",
    )


def _shares(
    of: MeasuredRun, runs: EnsembleRuns, again: EnsembleRuns | None
) -> list[ComparedFigure]:
    """Return the shares of time by cause; `work`, which is goodput, first."""
    whole_s = sum(of.spent_s.values())
    rows: list[ComparedFigure] = []
    for number, cause in enumerate(CAUSES):
        name = "goodput" if cause == "work" else cause
        predicted, repeated = (
            band(name, "share", run.spent_s[number] / run.spent_s.sum(axis=0)) if run else None
            for run in (runs, again)
        )
        assert predicted is not None
        observed = Quantity(
            name=name,
            value=of.spent_s[cause] / whole_s,
            unit="share",
            how="given",
            source="wall time of all seats",
        )
        rows.append(_compared(predicted, observed, repeated))
    return rows


def _compared(predicted: Quantity, observed: Quantity, again: Quantity | None) -> ComparedFigure:
    return ComparedFigure(
        predicted=predicted,
        observed=observed,
        verdict=_verdict(predicted, observed),
        at_its_rate=again,
        verdict_at_its_rate=_verdict(again, observed) if again else None,
    )


def _verdict(predicted: Quantity, observed: Quantity) -> Verdict:
    """Return whether two bands, or values without one, are disjoint."""

    def ends(quantity: Quantity) -> tuple[float, float]:
        return (
            quantity.value if quantity.low is None else quantity.low,
            quantity.value if quantity.high is None else quantity.high,
        )

    (predicted_low, predicted_high), (low, high) = ends(predicted), ends(observed)
    if low > predicted_high + CLOSE:
        return "more"
    return "less" if high < predicted_low - CLOSE else "within"
