"""Goodput against the number of GPUs, by strategy: where one overtakes another."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from outlast import figure_style
from outlast.errors import ConfigError
from outlast.plan.answers import HIGH, LOW, at_rate
from outlast.plan.compare import Asked, simulated
from outlast.plan.figures import style
from outlast.plan.ladders import STRATEGIES, Strategy
from outlast.plan.rates import EXACT
from outlast.plan.scenario import Scenario, resized
from outlast.plan.strategies import at_other_rate, possible, tuned_job
from outlast.plan.words import figure as said

SMALLEST, LARGEST = 8, 10_000_000
SIMULATED = (128, 2048, 16_384, 131_072, 1_048_576)
REPLICATIONS = 48
SHADED: tuple[Strategy, ...] = ("checkpoint-restart", "outlast")
CLOSE = 0.002  # strategies as near as this all along are one line


class Line(NamedTuple):
    """A strategy by theory: goodput at the mean failure rate, and at the ends of its band."""

    gpus: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray


def draw(scenario: Scenario, path: Path, seed: int = 0) -> None:
    """Theory as lines and bands, P5 to P95 of some simulated runs beside it."""
    figure_style.save(path, partial(_fill, scenario=scenario, seed=seed))


def sizes(scenario: Scenario) -> list[Scenario]:
    """The scenario at twice as many GPUs again and again, where it can be had."""
    found: list[Scenario] = []
    gpus = max(SMALLEST, scenario.gpus_per_node)
    while gpus <= LARGEST:
        with suppress(ConfigError):  # more replicas or spares than nodes, too many in repair
            found.append(resized(scenario, gpus))
        gpus *= 2
    return found


def line(at: list[Scenario], strategy: Strategy) -> Line:
    """As long as the strategy is possible."""
    rows: list[tuple[float, ...]] = []
    for one in at:
        if possible(one, strategy):
            continue
        job = tuned_job(one, strategy)
        ends = (LOW, HIGH) if one.failures.weight_failures != EXACT else ()
        goodput = [
            at_other_rate(each, strategy, job).goodput
            for each in (one, *(at_rate(one, end) for end in ends))
        ]
        rows.append((float(one.gpus), goodput[0], min(goodput), max(goodput)))
    return Line(*np.array(rows).reshape(-1, 4).T)


def crossings(first: Line, second: Line) -> list[tuple[float, float]]:
    """Where two lines cross, as GPUs and goodput; not where they only touch."""
    shared = np.intersect1d(first.gpus, second.gpus)
    one, other = (each.middle[np.isin(each.gpus, shared)] for each in (first, second))
    apart = np.flatnonzero(np.abs(one - other) > CLOSE)
    found: list[tuple[float, float]] = []
    for before, after in pairwise(apart):
        left, right = one[before] - other[before], one[after] - other[after]
        if left * right > 0:
            continue
        part = left / (left - right)
        gpus = shared[before] * (shared[after] / shared[before]) ** part
        found.append((float(gpus), float(one[before] + part * (one[after] - one[before]))))
    return found


def _fill(figure: Figure, scenario: Scenario, seed: int) -> None:
    axis = figure.subplots()
    axis.set_xscale("log")
    at = sizes(scenario)
    lines: dict[Strategy, Line] = {
        one: found for one in STRATEGIES if len((found := line(at, one)).gpus)
    }
    for strategy, one in lines.items():
        colour, dashes, marker = style.LOOK[strategy]
        lies = 1 if strategy == "outlast" else 2  # below the one that it often coincides with
        axis.plot(
            one.gpus, one.middle, dashes, color=colour, lw=3.2 - lies, zorder=lies + 1,
            label=strategy, marker=marker, markevery=[0], ms=3,
        )  # fmt: skip
        if strategy in SHADED:
            axis.fill_between(one.gpus, one.low, one.high, color=colour, alpha=0.13, lw=0)
    _simulated(axis, at, seed)
    _crossings(axis, lines)
    axis.axvline(scenario.gpus, color="black", lw=0.6, ls=(0, (1, 3)))
    axis.set_xlim(SMALLEST, LARGEST)
    axis.set_ylim(0, 1)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: said(value, "GPUs")))
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
    for one in at:
        if one.gpus not in SIMULATED:
            continue
        here: list[Strategy] = [each for each in STRATEGIES if not possible(one, each)]
        found = simulated(one, here, Asked(seed=seed, replications=REPLICATIONS))
        for strategy, runs in found.runs.items():
            goodput = one.work_s / runs.wall_s
            low, middle, high = np.quantile(goodput, (LOW, 0.5, HIGH), method="inverted_cdf")
            colour, _, marker = style.LOOK[strategy]
            beside = 1.1 ** (STRATEGIES.index(strategy) - len(STRATEGIES) // 2)
            axis.errorbar(
                one.gpus * beside, middle, yerr=[[middle - low], [high - middle]], color=colour,
                fmt=marker, ms=2.5, lw=0.7, zorder=4,
            )  # fmt: skip


def _crossings(axis: Axes, lines: dict[Strategy, Line]) -> None:
    names = list(lines)
    marked: list[tuple[float, float]] = []
    for number, one in enumerate(names):
        for other in names[number + 1 :]:
            for gpus, goodput in crossings(lines[one], lines[other]):
                near = [
                    (x, y) for x, y in marked
                    if abs(math.log(x / gpus)) < 0.5 and abs(y - goodput) < 0.03
                ]  # fmt: skip
                if near:
                    continue  # of two strategies that coincide with a third
                marked.append((gpus, goodput))
                axis.plot(gpus, goodput, "o", mfc="none", mec="black", ms=6, mew=0.8, zorder=5)
                axis.annotate(
                    said(gpus, "GPUs"), (gpus, goodput), (-5, -5), textcoords="offset points",
                    ha="right", va="top", fontsize=7, zorder=6,
                )  # fmt: skip
