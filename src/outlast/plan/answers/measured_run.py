"""Comparison of a real run with the prediction of one as long."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from outlast.errors import RunDirError
from outlast.events import AnyEvent, CheckpointSaved
from outlast.plan.model.answer_values import HIGH, LOW, YEAR_S, Quantity
from outlast.plan.model.ladder_costs import Strategy
from outlast.plan.model.rates import EXACT, StatedFailures
from outlast.plan.model.scenario import Scenario
from outlast.plan.model.strategy_prediction import tuned_job
from outlast.plan.simulate.replications import (
    CAUSES,
    Cause,
    EnsembleRuns,
    affordable,
    at_factor,
    band,
    draws,
    run_ensemble,
)
from outlast.plan.simulate.simulated_job import SimulatedJob, job_of
from outlast.telemetry.event_store import life_of
from outlast.telemetry.history.run_history import RunHistory, read_history
from outlast.telemetry.run_costs import run_costs
from outlast.telemetry.run_summary import RunSummary, summarise_history
from outlast.telemetry.segment_files import SegmentDamage
from outlast.telemetry.time_accounting import CODES, Bucket, TimeAccount, account
from outlast.theory import failures, numerics, strategies

Verdict = Literal["within", "more", "less"]
CLOSE = 1e-9  # of rounding
RATE = "failures a GPU-year"
# Buckets that the model covers; it excludes the first start and the last stop.
OF_BUCKET: dict[Bucket, Cause] = {
    "step": "work",
    "eval": "work",
    "script": "work",
    "checkpoint": "save",
    "lost": "redo",
    "recovery": "restart",
    "start": "restart",
    "absent": "wait",
    "stop": "restart",
    "down": "wait",
}


class MeasuredRun(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a measured run.

    `spent_s`: seat-seconds by cause, without the first start and the last stop (`outside_s`); empty
    where nothing was measured. `work_s`: of one seat. `exposure_s`: seat-seconds in which something
    could fail. `transient`, `fatal`: shares of failures after which all hosts went on, and of those
    that restarted from storage. `course`: of one seat, pairs of seconds since its first step and
    seconds of work that lasted. `fields`: scenario fields by key, as measured.
    """

    summary: RunSummary
    failures: int
    transient: float
    fatal: float
    exposure_s: float
    outside_s: float
    work_s: float
    spent_s: dict[Cause, float]
    course: list[tuple[float, float]]
    fields: dict[str, str]


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


def read_measured_run(run_dir: Path) -> MeasuredRun:
    """Read a run; it may be done, alive or dead. Raises RunDirError when `run_dir` holds none, and
    CorruptionError when its times do not add up."""
    damages: list[SegmentDamage] = []
    history = read_history(run_dir, damages.append)
    life = life_of(run_dir, history.events)
    times = account(history, running=life == "running")
    summary = summarise_history(history, run_dir, damages, life=life, times=times)
    if not times.wall_ns:
        raise RunDirError(f"{run_dir}: no time has passed in this run; nothing can be compared")
    outside_s = _outside_s(times)
    spent_s = _spent_s(summary, outside_s) if summary.goodput is not None else {}
    count = sum(cause.count for cause in summary.causes.values())
    fatal = sum(
        incident.rung == "restart" and incident.cause in summary.causes
        for incident in summary.incidents
    )
    hosts_lost = sum(
        incident.rung != "restart" and incident.cause == "agent_lost"
        for incident in summary.incidents
    )
    work_s = spent_s.get("work", 0.0) / summary.world
    return MeasuredRun(
        summary=summary,
        failures=count,
        transient=(count - fatal - hosts_lost) / count if count else 0.0,
        fatal=fatal / count if count else 0.0,
        exposure_s=times.capacity_ns / 1e9 - summary.buckets_s["down"],
        outside_s=outside_s,
        work_s=work_s,
        spent_s=spent_s,
        course=_course(times) if spent_s else [],
        fields=_fields(history, summary, work_s) if work_s else {},
    )


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


def _fields(history: RunHistory, summary: RunSummary, work_s: float) -> dict[str, str]:
    """Return the scenario fields that the run measured, by key."""
    costs = run_costs(history)
    mean_s = {name: cost.mean_s for name, cost in costs.measured().items()}
    interval_s = _interval_s(history.events, work_s / max(1, summary.steps or 0)) or work_s
    mean_s["flush"] = min(mean_s.get("flush", 0.0), interval_s)
    mean_s.setdefault("cost", 0.0)
    fields = {name: f"{value:.6f}s" for name, value in mean_s.items() if value or name != "step"}
    fields["interval"] = f"{interval_s:.6f}s"
    if "pause" in mean_s:
        fields["window"] = "0"  # a replica is whole when its state has moved, in the pause
    return fields


def _interval_s(events: Sequence[AnyEvent], step_s: float) -> float:
    """Return the mean work between two checkpoints; 0 where none was saved."""
    saved = sorted({event.step for event in events if isinstance(event, CheckpointSaved)})
    return saved[-1] / len(saved) * step_s if saved else 0.0


def _outside_s(times: TimeAccount) -> float:
    """Return the seconds of the first start and the last stop of every seat."""
    lanes = [lane.claims for lane in times.lanes if len(lane.claims.begin)]
    edges = [claims.chosen(slice(1)) for claims in lanes if claims.code[0] == CODES["start"]]
    edges += [
        claims.chosen(slice(-1, None)) for claims in lanes if claims.code[-1] == CODES["stop"]
    ]
    return sum(int(edge.end[0] - edge.begin[0]) for edge in edges) / 1e9


def _course(times: TimeAccount) -> list[tuple[float, float]]:
    spans = [span for span in times.lanes[0].spans if span.bucket not in ("start", "stop")]
    begun_ns = spans[0].begin_ns if spans else 0
    done_s = 0.0
    course = [(0.0, 0.0)]
    for span in spans:
        if OF_BUCKET[span.bucket] == "work":
            course.append(((span.begin_ns - begun_ns) / 1e9, done_s))
            done_s += (span.end_ns - span.begin_ns) / 1e9
            course.append(((span.end_ns - begun_ns) / 1e9, done_s))
    return course


def _spent_s(summary: RunSummary, outside_s: float) -> dict[Cause, float]:
    spent_s: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
    for bucket, seconds in summary.buckets_s.items():
        spent_s[OF_BUCKET[bucket]] += seconds
    spent_s["restart"] -= outside_s
    # Until a failure is noticed, its peers wait in an attempt that is then lost.
    noticing_s = (
        sum(incident.phases_ms["notice"] for incident in summary.incidents) / 1e3 * summary.world
    )
    spent_s["detect"] = min(spent_s["redo"], noticing_s)
    spent_s["redo"] -= spent_s["detect"]
    return spent_s


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
