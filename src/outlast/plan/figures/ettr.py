"""ETTR over the interval and the failure rate, as contours (Kokolis et al. 2025, figure 10)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from msgspec.structs import replace

from outlast import figure_style
from outlast.controller.save_schedule.schedule_explanation import span
from outlast.plan.answers import HIGH, LOW
from outlast.plan.ettr import exact, init_s, interval_s
from outlast.plan.figures import style
from outlast.plan.rates import EXACT
from outlast.plan.scenario import Scenario
from outlast.theory.failures import DAY_S, PRESETS

POINTS = 60
LEVELS = (0.5, 0.9, 0.95, 0.99)
REACH = 30.0  # from where the scenario is to the ends of the axes
NAMED = ("llama3-405b", "rsc-1", "rsc-2")  # those that were measured
LINES = (":", "-.", "--", "-")
SHADES = ("#8d96a3", "#b5bcc6", "#d9d2b4", "#ece3b0", "#fbf3c4")  # dark to light in grey, too


def draw(scenario: Scenario, queue_s: float, path: Path) -> None:
    """Isolines of the exact ETTR, the published rates, and where the scenario is with its band."""
    figure_style.save(path, partial(_fill, scenario=scenario, queue_s=queue_s))


def _fill(figure: Figure, scenario: Scenario, queue_s: float) -> None:
    axis = figure.subplots()
    here_s, to_rate = interval_s(scenario), 1000 * DAY_S * scenario.gpus_per_node
    here = scenario.failures.per_gpu_s * to_rate
    known = [PRESETS[name].rate_per_device_s * to_rate for name in NAMED]
    least, most = _telling(scenario, here_s)
    low = min(here / REACH, *known, least * to_rate)
    high = max(here * REACH, *known, most * to_rate)
    at_s = np.geomspace(here_s / REACH, here_s * REACH, POINTS)
    rates = np.geomspace(low, high, POINTS)
    ratio = np.array(
        [[_at(scenario, one, rate / to_rate, queue_s) for one in at_s] for rate in rates]
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
    for name, rate in zip(NAMED, known, strict=True):
        axis.axhline(rate, color="#444444", lw=0.5)
        axis.annotate(name, (1.01, rate), xycoords=("axes fraction", "data"), va="center")
    _current(axis, scenario, here_s, here)
    style.spans(axis.xaxis, float(at_s[0]), float(at_s[-1]))
    axis.set_xlim(at_s[0], at_s[-1])
    axis.set_ylim(low, high)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_xlabel("work between two durable saves")
    axis.set_ylabel(f"failures per 1000 days of a node with {scenario.gpus_per_node} GPUs")
    axis.set_title(
        f"ETTR of {scenario.gpus:,} GPUs; a start takes {span(init_s(scenario))}, a save"
        f" {span(scenario.cost_s)}", loc="left",
    )  # fmt: skip


def _telling(scenario: Scenario, at_s: float) -> tuple[float, float]:
    """Failures of a GPU a second, between which ETTR goes from nearly everything to little."""
    lost_s = init_s(scenario) + at_s
    return 0.01 / lost_s / scenario.gpus, 2 / lost_s / scenario.gpus


def _at(scenario: Scenario, at_s: float, per_gpu_s: float, queue_s: float) -> float:
    rate = replace(scenario.failures, per_gpu_s=per_gpu_s)
    return exact(replace(scenario, failures=rate), float(at_s), queue_s)


def _current(axis: Axes, scenario: Scenario, here_s: float, here: float) -> None:
    """Where the scenario is; the rate's band, where it has one."""
    rate = scenario.failures
    error = None
    if rate.weight_failures != EXACT:
        low, high = (here * rate.at(end) / rate.per_gpu_s for end in (LOW, HIGH))
        error = [[here - low], [high - here]]
    said = "given" if scenario.interval_s else "best"
    band = f"{rate.name} and its band" if error else rate.name
    axis.errorbar(
        [here_s], [here], yerr=error, fmt="D", color="#d55e00", mec="black", mew=0.6, ms=5, lw=1.2,
        capsize=3, label=f"this scenario: {said} interval {span(here_s)}, {band}",
    )  # fmt: skip
    axis.legend(loc="upper right", frameon=True, framealpha=0.9, edgecolor="none")
