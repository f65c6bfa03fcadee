"""Goodput against the interval: how flat the best is, and what was simulated."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from msgspec.structs import replace

from outlast import figure_style
from outlast.controller.save_schedule.schedule_explanation import span
from outlast.plan.figures import style
from outlast.plan.interval import flat_zone, waste
from outlast.plan.ladders import Strategy, mtbf_s
from outlast.plan.scenario import Scenario
from outlast.plan.simulate import simulate
from outlast.plan.simulated import job_of
from outlast.plan.strategies import predict
from outlast.theory import intervals

POINTS, SIMULATED, REPLICATIONS = 80, 9, 60
FAILURES_MAX = 4e6  # of what is simulated for one interval
SPAN = 30.0  # from the best to either end
NARROWEST = 1.5  # from end to end
EDGE = 1.03  # so that what lies on an end is seen whole


def draw(scenario: Scenario, strategy: Strategy, path: Path) -> None:
    """The exact curve, the flat zone, Young's and the given interval, and P5 to P95 of runs."""
    figure_style.save(path, partial(_fill, scenario=scenario, strategy=strategy))


def _fill(figure: Figure, scenario: Scenario, strategy: Strategy) -> None:
    axis = figure.subplots()
    colour = style.LOOK[strategy][0]
    tuned = replace(scenario, interval_s=None)
    best = predict(tuned, strategy)
    best_s = best.interval_s
    high_s = min(best_s * SPAN, scenario.work_s)
    low_s = max(best_s / SPAN, scenario.flush_s, scenario.step_s, scenario.memory_interval_s or 0.0)
    low_s = min(low_s, high_s / NARROWEST)
    lost = partial(waste, tuned, strategy)
    at_s = np.geomspace(low_s, high_s, POINTS)
    axis.set_xscale("log")
    axis.plot(at_s, [1 - lost(float(one)) for one in at_s], color=colour, label=strategy)
    zone = flat_zone(tuned, best)
    axis.axvspan(
        max(zone.low_s, low_s), min(zone.high_s, high_s), color="#56b4e9", alpha=0.18, lw=0,
        label="within one point of the best",
    )  # fmt: skip
    _simulated(axis, tuned, strategy, low_s, high_s)
    young_s = intervals.young(scenario.cost_s, mtbf_s(scenario))
    if low_s <= young_s <= high_s:
        axis.axvline(young_s, color="black", ls="--", lw=0.8, label=f"Young: {span(young_s)}")
    if scenario.interval_s is not None:
        axis.axvline(
            scenario.interval_s,
            color="#cc79a7",
            lw=1.2,
            label=f"given: {span(scenario.interval_s)}",
        )
    axis.plot(best_s, 1 - lost(best_s), "k.", label=f"best: {span(best_s)}")
    style.spans(axis.xaxis, low_s, high_s)
    axis.set_xlim(low_s / EDGE, high_s * EDGE)
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    axis.set_xlabel("work between two durable saves")
    axis.set_ylabel("goodput")
    axis.set_title(f"{scenario.gpus:,} GPUs, {scenario.failures.name}", loc="left")
    axis.legend()


def _simulated(
    axis: Axes, scenario: Scenario, strategy: Strategy, low_s: float, high_s: float
) -> None:
    found: list[tuple[float, float, float, float]] = []
    for at_s in np.geomspace(low_s, high_s, SIMULATED):
        there = replace(scenario, interval_s=float(at_s))
        told = predict(there, strategy)
        if not told.outcome.failures_per_s * told.wall_s * REPLICATIONS < FAILURES_MAX:
            continue  # it would take minutes to show that next to nothing gets done
        job = job_of(there, strategy)
        goodput = job.work_s / simulate(job, REPLICATIONS)["wall_s"]
        low, middle, high = np.quantile(goodput, (0.05, 0.5, 0.95))
        if not math.isnan(middle):
            found.append((float(at_s), float(low), float(middle), float(high)))
    if not found:
        return
    at, low, middle, high = (np.array(column) for column in zip(*found, strict=True))
    axis.errorbar(
        at, middle, yerr=(middle - low, high - middle), fmt="o", color="#666666", ms=2.5, lw=0.8,
        capsize=2, label=f"{REPLICATIONS} simulated runs each, P5 to P95",
    )  # fmt: skip
