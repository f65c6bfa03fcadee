"""Figures over the number of GPUs: goodput by strategy, cheapest strategy by restart time."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter
from msgspec.structs import replace

from outlast import figure_style
from outlast.controller.save_schedule.save_intervals import span
from outlast.errors import ConfigError
from outlast.plan.answers.strategy_comparison import ComparisonRequest, simulate_strategies
from outlast.plan.figures import STRATEGY_LOOK, label_spans
from outlast.plan.model.answer_values import HIGH, LOW, at_rate, format_quantity
from outlast.plan.model.ladder_costs import STRATEGIES, Strategy
from outlast.plan.model.rates import EXACT
from outlast.plan.model.scenario import Scenario, resize
from outlast.plan.model.strategy_prediction import (
    at_other_rate,
    predict,
    reason_impossible,
    tuned_job,
)

SMALLEST = 8
LARGEST = 10_000_000
SIMULATED = (128, 2048, 16_384, 131_072, 1_048_576)
REPLICATIONS = 48
SHADED: tuple[Strategy, ...] = ("checkpoint-restart", "outlast")
CLOSE = 0.002  # strategies as near as this all along are one line


class ScaleLine(NamedTuple):
    """Goodput of a strategy by theory, at the mean failure rate and the ends of its band."""

    gpus: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray


def draw_scale(scenario: Scenario, path: Path, seed: int = 0) -> None:
    """Draw theory as lines and bands, with P5 to P95 of some simulated runs."""
    figure_style.save(path, partial(_fill_scale, scenario=scenario, seed=seed))


def scaled_scenarios(scenario: Scenario) -> list[Scenario]:
    """Return the scenario at repeatedly doubled GPUs, as far as it is possible."""
    sizes: list[Scenario] = []
    gpus = max(SMALLEST, scenario.gpus_per_node)
    while gpus <= LARGEST:
        with suppress(ConfigError):  # more replicas or spares than nodes, too many in repair
            sizes.append(resize(scenario, gpus))
        gpus *= 2
    return sizes


def scale_line(at: list[Scenario], strategy: Strategy) -> ScaleLine:
    """Return a strategy's line, up to the size at which it becomes impossible."""
    rows: list[tuple[float, ...]] = []
    for size in at:
        if reason_impossible(size, strategy):
            continue
        job = tuned_job(size, strategy)
        ends = (LOW, HIGH) if size.failures.weight_failures != EXACT else ()
        goodput = [
            at_other_rate(each, strategy, job).goodput
            for each in (size, *(at_rate(size, end) for end in ends))
        ]
        rows.append((float(size.gpus), goodput[0], min(goodput), max(goodput)))
    return ScaleLine(*np.array(rows).reshape(-1, 4).T)


def crossings(first: ScaleLine, second: ScaleLine) -> list[tuple[float, float]]:
    """Return the points, as GPUs and goodput, at which two lines cross; touching is no crossing."""
    shared = np.intersect1d(first.gpus, second.gpus)
    a, b = (each.middle[np.isin(each.gpus, shared)] for each in (first, second))
    distinct = np.flatnonzero(np.abs(a - b) > CLOSE)
    points: list[tuple[float, float]] = []
    for before, after in pairwise(distinct):
        start = a[before] - b[before]
        stop = a[after] - b[after]
        if start * stop > 0:
            continue
        part = start / (start - stop)
        gpus = shared[before] * (shared[after] / shared[before]) ** part
        points.append((float(gpus), float(a[before] + part * (a[after] - a[before]))))
    return points


def _fill_scale(figure: Figure, scenario: Scenario, seed: int) -> None:
    axis = figure.subplots()
    axis.set_xscale("log")
    at = scaled_scenarios(scenario)
    lines: dict[Strategy, ScaleLine] = {
        name: found for name in STRATEGIES if len((found := scale_line(at, name)).gpus)
    }
    for strategy, line in lines.items():
        colour, dashes, marker = STRATEGY_LOOK[strategy]
        lies = 1 if strategy == "outlast" else 2  # below a line that often coincides
        axis.plot(
            line.gpus,
            line.middle,
            dashes,
            color=colour,
            lw=3.2 - lies,
            zorder=lies + 1,
            label=strategy,
            marker=marker,
            markevery=[0],
            ms=3,
        )
        if strategy in SHADED:
            axis.fill_between(line.gpus, line.low, line.high, color=colour, alpha=0.13, lw=0)
    _simulated(axis, at, seed)
    _crossings(axis, lines)
    axis.axvline(scenario.gpus, color="black", lw=0.6, ls=(0, (1, 3)))
    axis.set_xlim(SMALLEST, LARGEST)
    axis.set_ylim(0, 1)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_quantity(value, "GPUs")))
    axis.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    axis.set_xlabel("GPUs")
    axis.set_ylabel("goodput")
    axis.set_title(
        f"Goodput by scale, {scenario.failures.name}; here {scenario.gpus:,} GPUs", loc="left"
    )
    _legend(axis, sure=scenario.failures.weight_failures == EXACT)


def _legend(axis: Axes, *, sure: bool) -> None:
    handles, _ = axis.get_legend_handles_labels()
    handles = [Line2D([], [], lw=0, label="theory, mean failure rate:"), *handles]
    if not sure:
        handles.append(
            Patch(fc="#999999", alpha=0.3, label="theory, 90 % of failure rates (two of them)")
        )
    runs = f"P5 to P95 of {REPLICATIONS} simulated runs"
    handles.append(Line2D([], [], color="black", lw=0.7, marker="|", ms=4, label=runs))
    axis.legend(handles=handles, loc="lower left", handlelength=3.2, fontsize=7)


def _simulated(axis: Axes, at: list[Scenario], seed: int) -> None:
    for size in at:
        if size.gpus not in SIMULATED:
            continue
        here: list[Strategy] = [each for each in STRATEGIES if not reason_impossible(size, each)]
        ensemble = simulate_strategies(
            size, here, ComparisonRequest(seed=seed, replications=REPLICATIONS)
        )
        for strategy, runs in ensemble.runs.items():
            goodput = size.work_s / runs.wall_s
            low, middle, high = np.quantile(goodput, (LOW, 0.5, HIGH), method="inverted_cdf")
            colour, _, marker = STRATEGY_LOOK[strategy]
            beside = 1.1 ** (STRATEGIES.index(strategy) - len(STRATEGIES) // 2)
            axis.errorbar(
                size.gpus * beside,
                middle,
                yerr=[[middle - low], [high - middle]],
                color=colour,
                fmt=marker,
                ms=2.5,
                lw=0.7,
                zorder=4,
            )


def _crossings(axis: Axes, lines: dict[Strategy, ScaleLine]) -> None:
    names = list(lines)
    marked: list[tuple[float, float]] = []
    for number, name in enumerate(names):
        for other in names[number + 1 :]:
            for gpus, goodput in crossings(lines[name], lines[other]):
                near = [
                    (x, y)
                    for x, y in marked
                    if abs(math.log(x / gpus)) < 0.5 and abs(y - goodput) < 0.03
                ]
                if near:
                    continue  # of two strategies that coincide with a third
                marked.append((gpus, goodput))
                axis.plot(gpus, goodput, "o", mfc="none", mec="black", ms=6, mew=0.8, zorder=5)
                axis.annotate(
                    format_quantity(gpus, "GPUs"),
                    (gpus, goodput),
                    (-5, -5),
                    textcoords="offset points",
                    ha="right",
                    va="top",
                    fontsize=7,
                    zorder=6,
                )


SHORTEST_S = 10.0
LONGEST_S = 7200.0
ROWS = 17
SIMPLE: tuple[Strategy, ...] = tuple(name for name in STRATEGIES if name != "outlast")
HATCHES: dict[Strategy, str] = {
    "checkpoint-restart": "",
    "peer-memory": "...",
    "migrate": "///",
    "drop": "\\\\\\",
}
PLAIN = 0.02  # smallest lead drawn in full colour
WORTH = 0.01  # further saving of `outlast` at which a line is drawn


class StrategyPhases(NamedTuple):
    """Cheapest strategy by restart time (rows) and GPUs (columns).

    The index in SIMPLE (-1: none ends), its lead as a share, and the further saving of `outlast`,
    which combines them all.
    """

    gpus: list[int]
    restart_s: np.ndarray
    winner: np.ndarray
    lead: np.ndarray
    saved: np.ndarray


def draw_phases(scenario: Scenario, path: Path) -> None:
    """Draw the cheapest strategy by theory; paler where the choice matters less."""
    figure_style.save(path, partial(_fill_phases, scenario=scenario))


def strategy_phases(scenario: Scenario, rows: int = ROWS) -> StrategyPhases:
    """Compute the cheapest strategy over GPUs and restart time, on a grid of `rows` rows."""
    at = scaled_scenarios(scenario)
    restart_s = np.geomspace(SHORTEST_S, LONGEST_S, rows)
    shape = (len(restart_s), len(at))
    winner = np.full(shape, -1)
    lead = np.zeros(shape)
    saved = np.zeros(shape)
    for row, each_s in enumerate(restart_s):
        for column, size in enumerate(at):
            here = replace(size, restart_s=float(each_s))
            usd = [_usd(here, name) for name in SIMPLE]
            first, second = sorted(usd)[:2]
            if math.isinf(first):
                continue
            winner[row, column] = usd.index(first)
            lead[row, column] = 1 - first / second
            saved[row, column] = 1 - _usd(here, "outlast") / first
    return StrategyPhases([size.gpus for size in at], restart_s, winner, lead, saved)


def _usd(scenario: Scenario, strategy: Strategy) -> float:
    return math.inf if reason_impossible(scenario, strategy) else predict(scenario, strategy).usd


def _fill_phases(figure: Figure, scenario: Scenario) -> None:
    phases = strategy_phases(scenario)
    axis = figure.subplots()
    axis.set_xscale("log")
    axis.set_yscale("log")
    handles = _cells(axis, phases)
    if (phases.winner < 0).any():
        handles.append(Patch(fc="white", ec="black", lw=0.5, label="none ends"))
    if phases.saved.max() > WORTH > phases.saved.min():
        axis.contour(
            phases.gpus,
            phases.restart_s,
            phases.saved,
            levels=(WORTH,),
            colors="black",
            linewidths=1.4,
        )
        label = f"outlast saves {WORTH:.0%} and more beyond it"
        handles.append(Line2D([], [], color="black", lw=1.4, label=label))
    if SHORTEST_S <= scenario.restart_s <= LONGEST_S:
        axis.plot(
            scenario.gpus, scenario.restart_s, "X", color="black", mec="white", ms=8, zorder=4
        )
    label_spans(axis.yaxis, SHORTEST_S, LONGEST_S)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_quantity(value, "GPUs")))
    axis.set_xlabel("GPUs")
    axis.set_ylabel("restart of the whole job from storage")
    axis.set_title(
        f"The cheapest strategy, {scenario.failures.name}\npale where it leads by less than"
        f" {PLAIN:.0%}; X: {scenario.gpus:,} GPUs, {span(scenario.restart_s)}",
        loc="left",
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=3)


def _cells(axis: Axes, phases: StrategyPhases) -> list[Patch | Line2D]:
    """Colour and hatch each cell by its cheapest strategy, so that grey prints stay legible."""
    columns = _edges(np.array(phases.gpus, float))
    rows = _edges(phases.restart_s)
    colours = np.ones((*phases.winner.shape, 3))
    depth = np.clip(phases.lead / PLAIN, 0.15, 1)[..., None]
    handles: list[Patch | Line2D] = []
    for number, strategy in enumerate(SIMPLE):
        here = phases.winner == number
        if not here.any():
            continue
        colour = STRATEGY_LOOK[strategy][0]
        hatch = HATCHES[strategy]
        tint = 1 - depth * (1 - np.array(to_rgb(colour)))
        colours = np.where(here[..., None], tint, colours)
        cells = [
            [
                (columns[x], rows[y]),
                (columns[x + 1], rows[y]),
                (columns[x + 1], rows[y + 1]),
                (columns[x], rows[y + 1]),
            ]
            for y, x in np.argwhere(here)
        ]
        hatched = PolyCollection(cells, fc="none", ec=(0, 0, 0, 0.45), hatch=hatch, lw=0, zorder=3)
        axis.add_collection(hatched)
        handles.append(Patch(fc=colour, hatch=hatch, ec=(0, 0, 0, 0.45), lw=0, label=strategy))
    axis.pcolormesh(columns, rows, colours, rasterized=True)
    axis.set_xlim(columns[0], columns[-1])
    axis.set_ylim(rows[0], rows[-1])
    return handles


def _edges(middles: np.ndarray) -> np.ndarray:
    """Return edges of cells around points that are evenly spaced on a logarithmic axis."""
    ratio = math.sqrt(middles[1] / middles[0]) if len(middles) > 1 else 2.0
    return np.append(middles / ratio, middles[-1] * ratio)
