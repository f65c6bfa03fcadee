"""Planner's query with the rates of a run."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlencode

from outlast.errors import UsageError
from outlast.plan.model.answer_values import format_quantity
from outlast.plan.model.measured_run import MeasuredRun, read_measured_run, scenario_texts
from outlast.text_formatting import plural
from outlast.theory import failures
from outlast.web.planner_answer import strategy_line
from outlast.web.planner_query import parse_query

PRIOR = failures.PRESETS["llama3-405b"]
_HOUR_S = 3600.0


def measured_query(run_dir: Path, price_per_hour: float = 0.0) -> str:
    """Return the query of a planner's page with everything that a run measured.

    `price_per_hour`: dollars an hour of the whole job; 0: unknown. Raises RunDirError when there is
    no run, and CorruptionError when its times do not add up.
    """
    run = read_measured_run(run_dir)
    texts = _texts(run)
    if price_per_hour:
        texts["gpu-hour"] = f"${price_per_hour / run.summary.world:.6f}"
    return urlencode(texts)


def predicted_sentence(run: MeasuredRun) -> str:
    """Compare the ETTR of a run with the one that the planner has for its rates."""
    spent_s = sum(run.spent_s.values())
    if not spent_s:
        return "plan: the run has measured nothing yet"
    measured = format_quantity(run.spent_s["work"] / spent_s, "share")
    try:
        query = parse_query(_texts(run))
        line = strategy_line(query.scenario, query.strategy)
    except UsageError as error:
        return f"plan: no prediction with the rates of this run: {error}"
    if line.predicted is None:
        return f"plan: no prediction with the rates of this run: {query.strategy} {line.why}"
    count = plural(run.failures, "failure")
    if not line.predicted.outcome.in_regime:
        return (
            f"plan: the rates of this run, {count}, are outside the regime of the formula;"
            f" `outlast plan compare --run {run.summary.run_dir}` simulates them"
        )
    goodput = format_quantity(line.predicted.outcome.goodput, "share")
    return f"plan: {goodput} with the rates of this run, {count}; without its start {measured}"


def _texts(run: MeasuredRun) -> dict[str, str]:
    strategy = "checkpoint-restart" if run.summary.restart_only else "outlast"
    return {"strategy": strategy, **scenario_texts(run), **_failures(run)}


def _failures(run: MeasuredRun) -> dict[str, str]:
    """Return the run's own failure rate; without failures, a published one after this run."""
    if run.failures:
        between_s, count = run.exposure_s / run.failures, run.failures
    else:
        rate = failures.posterior(PRIOR, 0, run.exposure_s)
        between_s, count = 1 / rate.mean, round(rate.prior_failures)
    text = f"{between_s:.3f}s" if between_s < _HOUR_S else f"{between_s / _HOUR_S:.4f}h"
    return {"failures": text, "failures-seen": str(max(1, count))}
