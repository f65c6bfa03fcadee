"""Figures over the interval: contours of ETTR (Kokolis et al. 2025, figure 10), goodput."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter
from msgspec.structs import replace

from outlast import figure_style
from outlast.controller.save_schedule.save_intervals import span
from outlast.plan.answers.formula_answers import exact, flat_zone, init_s, interval_s, waste
from outlast.plan.figures import STRATEGY_LOOK, label_spans
from outlast.plan.model.answer_values import HIGH, LOW
from outlast.plan.model.ladder_costs import Strategy, mtbf_s
from outlast.plan.model.rates import EXACT
from outlast.plan.model.scenario import Scenario
from outlast.plan.model.strategy_prediction import predict
from outlast.plan.simulate.replications import simulate
from outlast.plan.simulate.simulated_job import job_of
from outlast.theory import intervals
from outlast.theory.failures import DAY_S, PRESETS

GRID_POINTS = 60
LEVELS = (0.5, 0.9, 0.95, 0.99)
REACH = 30.0  # from where the scenario is to the ends of the axes
MEASURED_PRESETS = ("llama3-405b", "rsc-1", "rsc-2")  # those that were measured
LINES = (":", "-.", "--", "-")
SHADES = ("#8d96a3", "#b5bcc6", "#d9d2b4", "#ece3b0", "#fbf3c4")  # dark to light in grey, too


def draw_ettr(scenario: Scenario, queue_s: float, path: Path) -> None:
    """Draw isolines of the exact ETTR, the published rates, and the scenario with its band."""
    figure_style.save(path, partial(_fill_ettr, scenario=scenario, queue_s=queue_s))


def _fill_ettr(figure: Figure, scenario: Scenario, queue_s: float) -> None:
    axis = figure.subplots()
    here_s = interval_s(scenario)
    to_rate = 1000 * DAY_S * scenario.gpus_per_node
    here = scenario.failures.per_gpu_s * to_rate
    known = [PRESETS[name].rate_per_device_s * to_rate for name in MEASURED_PRESETS]
    least, most = _telling(scenario, here_s)
    low = min(here / REACH, *known, least * to_rate)
    high = max(here * REACH, *known, most * to_rate)
    at_s = np.geomspace(here_s / REACH, here_s * REACH, GRID_POINTS)
    rates = np.geomspace(low, high, GRID_POINTS)
    ratio = np.array(
        [[_at(scenario, tau_s, rate / to_rate, queue_s) for tau_s in at_s] for rate in rates]
    )
    axis.set_xscale("log")
    axis.set_yscale("log")
    shades = axis.contourf(
        at_s, rates, ratio, levels=(0, *LEVELS, 1), colors=SHADES, extend="neither"
    )
    shades.set_edgecolor("face")  # else fine seams show between shades
    shades.set_linewidth(0.2)
    lines = axis.contour(
        at_s, rates, ratio, levels=LEVELS, colors="black", linewidths=0.9, linestyles=LINES
    )
    axis.clabel(lines, fmt=lambda level: f"{level:g}", fontsize=7)
    for name, rate in zip(MEASURED_PRESETS, known, strict=True):
        axis.axhline(rate, color="#444444", lw=0.5)
        axis.annotate(name, (1.01, rate), xycoords=("axes fraction", "data"), va="center")
    _current(axis, scenario, here_s, here)
    label_spans(axis.xaxis, float(at_s[0]), float(at_s[-1]))
    axis.set_xlim(at_s[0], at_s[-1])
    axis.set_ylim(low, high)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_xlabel("work between two durable saves")
    axis.set_ylabel(f"failures per 1000 days of a node with {scenario.gpus_per_node} GPUs")
    axis.set_title(
        f"ETTR of {scenario.gpus:,} GPUs; a start takes {span(init_s(scenario))}, a save"
        f" {span(scenario.cost_s)}",
        loc="left",
    )


def _telling(scenario: Scenario, at_s: float) -> tuple[float, float]:
    """Return the failure rates per GPU-second between which ETTR falls from high to low."""
    lost_s = init_s(scenario) + at_s
    return 0.01 / lost_s / scenario.gpus, 2 / lost_s / scenario.gpus


def _at(scenario: Scenario, at_s: float, per_gpu_s: float, queue_s: float) -> float:
    rate = replace(scenario.failures, per_gpu_s=per_gpu_s)
    return exact(replace(scenario, failures=rate), float(at_s), queue_s)


def _current(axis: Axes, scenario: Scenario, here_s: float, here: float) -> None:
    """Return the scenario's point; with the rate's band, where it has one."""
    rate = scenario.failures
    error = None
    if rate.weight_failures != EXACT:
        low, high = (here * rate.at(end) / rate.per_gpu_s for end in (LOW, HIGH))
        error = [[here - low], [high - here]]
    label = "given" if scenario.interval_s else "best"
    band = f"{rate.name} and its band" if error else rate.name
    axis.errorbar(
        [here_s],
        [here],
        yerr=error,
        fmt="D",
        color="#d55e00",
        mec="black",
        mew=0.6,
        ms=5,
        lw=1.2,
        capsize=3,
        label=f"this scenario: {label} interval {span(here_s)}, {band}",
    )
    axis.legend(loc="upper right", frameon=True, framealpha=0.9, edgecolor="none")


POINTS = 80
SIMULATED = 9
REPLICATIONS = 60
FAILURES_MAX = 4e6  # simulated for one interval
SPAN = 30.0  # from the best to either end
NARROWEST = 1.5  # from end to end
EDGE = 1.03  # margin: markers at an end are drawn whole


def draw_goodput(scenario: Scenario, strategy: Strategy, path: Path) -> None:
    """Draw exact goodput, the flat zone, Young's and the given interval, and simulated runs."""
    figure_style.save(path, partial(_fill_goodput, scenario=scenario, strategy=strategy))


def _fill_goodput(figure: Figure, scenario: Scenario, strategy: Strategy) -> None:
    axis = figure.subplots()
    colour = STRATEGY_LOOK[strategy][0]
    tuned = replace(scenario, interval_s=None)
    best = predict(tuned, strategy)
    best_s = best.interval_s
    high_s = min(best_s * SPAN, scenario.work_s)
    low_s = max(best_s / SPAN, scenario.flush_s, scenario.step_s, scenario.memory_interval_s or 0.0)
    low_s = min(low_s, high_s / NARROWEST)
    lost = partial(waste, tuned, strategy)
    at_s = np.geomspace(low_s, high_s, POINTS)
    axis.set_xscale("log")
    axis.plot(at_s, [1 - lost(float(tau_s)) for tau_s in at_s], color=colour, label=strategy)
    zone = flat_zone(tuned, best)
    axis.axvspan(
        max(zone.low_s, low_s),
        min(zone.high_s, high_s),
        color="#56b4e9",
        alpha=0.18,
        lw=0,
        label="within one point of the best",
    )
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
    label_spans(axis.xaxis, low_s, high_s)
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
    points: list[tuple[float, float, float, float]] = []
    for at_s in np.geomspace(low_s, high_s, SIMULATED):
        there = replace(scenario, interval_s=float(at_s))
        predicted = predict(there, strategy)
        if not predicted.outcome.failures_per_s * predicted.wall_s * REPLICATIONS < FAILURES_MAX:
            continue  # simulation takes minutes, goodput is near 0
        job = job_of(there, strategy)
        goodput = job.work_s / simulate(job, REPLICATIONS)["wall_s"]
        low, middle, high = np.quantile(goodput, (0.05, 0.5, 0.95))
        if not math.isnan(middle):
            points.append((float(at_s), float(low), float(middle), float(high)))
    if not points:
        return
    at, low, middle, high = (np.array(column) for column in zip(*points, strict=True))
    axis.errorbar(
        at,
        middle,
        yerr=(middle - low, high - middle),
        fmt="o",
        color="#666666",
        ms=2.5,
        lw=0.8,
        capsize=2,
        label=f"{REPLICATIONS} simulated runs each, P5 to P95",
    )
