"""Planner's query with the rates of a run."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlencode

from outlast.plan.model.measured_run import MeasuredRun, read_measured_run, scenario_texts
from outlast.theory import failures

PRIOR = failures.PRESETS["llama3-405b"]
_HOUR_S = 3600.0


def measured_query(run_dir: Path, price_per_hour: float = 0.0) -> str:
    """Return the query of a planner's page with everything that a run measured.

    `price_per_hour`: dollars an hour of the whole job; 0: unknown. Raises RunDirError when there is
    no run, and CorruptionError when its times do not add up.
    """
    run = read_measured_run(run_dir)
    texts = {**scenario_texts(run), **_failures(run)}
    if price_per_hour:
        texts["gpu-hour"] = f"${price_per_hour / run.summary.world:.6f}"
    strategy = "checkpoint-restart" if run.summary.restart_only else "outlast"
    return urlencode({"strategy": strategy, **texts})


def _failures(run: MeasuredRun) -> dict[str, str]:
    """Return the run's own failure rate; without failures, a published one after this run."""
    if run.failures:
        between_s, count = run.exposure_s / run.failures, run.failures
    else:
        rate = failures.posterior(PRIOR, 0, run.exposure_s)
        between_s, count = 1 / rate.mean, round(rate.prior_failures)
    text = f"{between_s:.3f}s" if between_s < _HOUR_S else f"{between_s / _HOUR_S:.4f}h"
    return {"failures": text, "failures-seen": str(max(1, count))}
