"""Which strategy is cheapest, over the number of GPUs and the time of a restart."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator
from msgspec.structs import replace

from outlast import figure_style
from outlast.controller.save_schedule.schedule_explanation import span
from outlast.plan.figures import style
from outlast.plan.figures.scale import sizes
from outlast.plan.ladders import STRATEGIES, Strategy
from outlast.plan.scenario import Scenario
from outlast.plan.strategies import possible, predict
from outlast.plan.words import figure as said

SHORTEST_S, LONGEST_S, ROWS = 10.0, 7200.0, 17
SIMPLE: tuple[Strategy, ...] = tuple(one for one in STRATEGIES if one != "outlast")
HATCHES: dict[Strategy, str] = {
    "checkpoint-restart": "", "peer-memory": "...", "migrate": "///", "drop": "\\\\\\",
}  # fmt: skip
PLAIN = 0.02  # a lead of so much and more is drawn in full colour
WORTH = 0.01  # what all of them together save beyond the best one, where a line is drawn


class Phases(NamedTuple):
    """By row (restart time) and column (GPUs): which of SIMPLE is cheapest (-1: none ends), by what
    share it leads, and what `outlast`, which has all of them, saves beyond it."""

    gpus: list[int]
    restart_s: np.ndarray
    winner: np.ndarray
    lead: np.ndarray
    saved: np.ndarray


def draw(scenario: Scenario, path: Path) -> None:
    """By theory; the paler, the less it matters."""
    figure_style.save(path, partial(_fill, scenario=scenario))


def phases(scenario: Scenario, rows: int = ROWS) -> Phases:
    at = sizes(scenario)
    restart_s = np.geomspace(SHORTEST_S, LONGEST_S, rows)
    shape = (len(restart_s), len(at))
    winner, lead, saved = np.full(shape, -1), np.zeros(shape), np.zeros(shape)
    for row, each_s in enumerate(restart_s):
        for column, size in enumerate(at):
            here = replace(size, restart_s=float(each_s))
            usd = [_usd(here, one) for one in SIMPLE]
            first, second = sorted(usd)[:2]
            if math.isinf(first):
                continue
            winner[row, column] = usd.index(first)
            lead[row, column] = 1 - first / second
            saved[row, column] = 1 - _usd(here, "outlast") / first
    return Phases([one.gpus for one in at], restart_s, winner, lead, saved)


def _usd(scenario: Scenario, strategy: Strategy) -> float:
    return math.inf if possible(scenario, strategy) else predict(scenario, strategy).usd


def _fill(figure: Figure, scenario: Scenario) -> None:
    found = phases(scenario)
    axis = figure.subplots()
    axis.set_xscale("log")
    axis.set_yscale("log")
    handles = _cells(axis, found)
    if (found.winner < 0).any():
        handles.append(Patch(fc="white", ec="black", lw=0.5, label="none ends"))
    if found.saved.max() > WORTH > found.saved.min():
        axis.contour(
            found.gpus, found.restart_s, found.saved, levels=(WORTH,), colors="black",
            linewidths=1.4,
        )  # fmt: skip
        label = f"outlast saves {WORTH:.0%} and more beyond it"
        handles.append(Line2D([], [], color="black", lw=1.4, label=label))
    if SHORTEST_S <= scenario.restart_s <= LONGEST_S:
        axis.plot(
            scenario.gpus, scenario.restart_s, "X", color="black", mec="white", ms=8, zorder=4
        )
    style.spans(axis.yaxis, SHORTEST_S, LONGEST_S)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: said(value, "GPUs")))
    axis.set_xlabel("GPUs")
    axis.set_ylabel("restart of the whole job from storage")
    axis.set_title(
        f"The cheapest strategy, {scenario.failures.name}\npale where it leads by less than"
        f" {PLAIN:.0%}; X: {scenario.gpus:,} GPUs, {span(scenario.restart_s)}", loc="left",
    )  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=3)


def _cells(axis: Axes, found: Phases) -> list[Patch | Line2D]:
    """Each in the colour and the hatch of what wins there, so that it is told apart in grey."""
    columns, rows = _edges(np.array(found.gpus, float)), _edges(found.restart_s)
    colours = np.ones((*found.winner.shape, 3))
    depth = np.clip(found.lead / PLAIN, 0.15, 1)[..., None]
    handles: list[Patch | Line2D] = []
    for number, strategy in enumerate(SIMPLE):
        here = found.winner == number
        if not here.any():
            continue
        colour, hatch = style.LOOK[strategy][0], HATCHES[strategy]
        tint = 1 - depth * (1 - np.array(to_rgb(colour)))
        colours = np.where(here[..., None], tint, colours)
        cells = [
            [(columns[x], rows[y]), (columns[x + 1], rows[y]), (columns[x + 1], rows[y + 1]),
             (columns[x], rows[y + 1])]
            for y, x in np.argwhere(here)
        ]  # fmt: skip
        hatched = PolyCollection(cells, fc="none", ec=(0, 0, 0, 0.45), hatch=hatch, lw=0, zorder=3)
        axis.add_collection(hatched)
        handles.append(Patch(fc=colour, hatch=hatch, ec=(0, 0, 0, 0.45), lw=0, label=strategy))
    axis.pcolormesh(columns, rows, colours, rasterized=True)
    axis.set_xlim(columns[0], columns[-1])
    axis.set_ylim(rows[0], rows[-1])
    return handles


def _edges(middles: np.ndarray) -> np.ndarray:
    """Of cells around points that are evenly apart on a logarithmic axis."""
    ratio = math.sqrt(middles[1] / middles[0]) if len(middles) > 1 else 2.0
    return np.append(middles / ratio, middles[-1] * ratio)
