"""Figure of spares: waiting and dollars against their number."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from outlast import figure_style
from outlast.errors import UsageError
from outlast.plan.answers.spare_nodes import SpareModel, cheapest, plain_usd, whole_replicas
from outlast.plan.model.answer_values import format_quantity as in_words
from outlast.plan.model.scenario import Scenario

POINTS = 160
LEAST = 1e-5  # of time: below, nobody waits
HEIGHT_INCH = 5.2
FEW = 30  # spares, to the left of which no label has room
NODES, REPLICAS, GOING_ON = "#0072b2", "#d55e00", "#009e73"


def draw(scenario: Scenario, path: Path) -> None:
    """Draw the share of time that a job waits, and below it the cost of spares and waiting.

    Raises UsageError where no run ends.
    """
    if math.isinf(plain_usd(scenario, SpareModel(scenario))):
        raise UsageError("--figure: no run ends here, whatever stands by: there is no cost to draw")
    figure_style.save(path, partial(_fill, scenario=scenario), HEIGHT_INCH)


def _fill(figure: Figure, scenario: Scenario) -> None:
    above, below = figure.subplots(2, 1, sharex=True)
    nodes = SpareModel(scenario)
    size = scenario.nodes // scenario.replicas
    once_usd = plain_usd(scenario, nodes)
    most = nodes.most
    _costs(below, nodes, 1, once_usd, NODES)
    above.plot(*_waits(nodes, 1), color=NODES, label="nodes, the job waits")
    if scenario.replicas > 1:
        _costs(below, nodes, 1, once_usd, GOING_ON, ":", dropping=True)
        below.plot([], [], color=GOING_ON, ls=":", label="nodes, it goes on without")
        if size > 1:
            replicas = whole_replicas(scenario)
            _costs(below, replicas, size, once_usd, REPLICAS, "--")
            above.plot(
                *_waits(replicas, size), color=REPLICAS, ls="--",
                label=f"replicas of {size:,} nodes, the job waits",
            )  # fmt: skip
            most = replicas.most * size
    _trap(above, below, nodes)
    above.set_xscale("symlog", linthresh=1)
    above.set_xlim(0, most)
    above.set_yscale("log")
    above.set_ylim(LEAST, 1)
    above.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    above.set_ylabel("share of time that the job waits")
    above.set_title(
        f"{scenario.gpus:,} GPUs, {scenario.failures.name},"
        f" {in_words(scenario.repair_s, 's')} of repair; dots: cheapest", loc="left",
    )  # fmt: skip
    below.set_yscale("log")
    below.set_ylim(bottom=below.get_ylim()[0] / 2)  # room for the numbers at the dots
    below.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: in_words(value, "USD")))
    for axis in (below.xaxis, below.yaxis):
        axis.set_minor_formatter(NullFormatter())
    below.set_xlabel("nodes that stand by")
    below.set_ylabel("cost of spares, waiting and idling")
    figure.legend(loc="outside lower center", ncols=3)


def _counts(most: int) -> list[int]:
    """Return whole numbers from 0 on, evenly spaced on a logarithmic axis."""
    return sorted({0, *(int(one) for one in np.geomspace(1, most, POINTS))})


def _waits(stocks: SpareModel, size: int) -> tuple[list[int], list[float]]:
    counts = _counts(stocks.most)
    return [size * one for one in counts], [stocks.stalled(one) for one in counts]


def _costs(
    axis: Axes,
    stocks: SpareModel,
    size: int,
    once_usd: float,
    colour: str,
    line: str = "-",
    *,
    dropping: bool = False,
) -> None:
    """Draw dollars above a run that never lacks a node, and mark the minimum."""

    def usd(count: int) -> float:
        return once_usd * (stocks.price(count, dropping=dropping) - 1)

    counts, best = _counts(stocks.most), cheapest([stocks], dropping=dropping)
    axis.plot([size * one for one in counts], [usd(one) for one in counts], color=colour, ls=line)
    axis.plot(size * best, usd(best), "o", color=colour, ms=4, mec="black", mew=0.6)
    is_left = dropping
    axis.annotate(
        f"{size * best:,}", (size * best, usd(best)), xytext=(-5 if is_left else 5, -3),
        textcoords="offset points", ha="right" if is_left else "left", va="top", color=colour,
    )  # fmt: skip


def _trap(above: Axes, below: Axes, nodes: SpareModel) -> None:
    """Mark the mean number in repair, the usual but too small choice."""
    mean = round(nodes.mean)
    if not mean:
        return
    for axis in (above, below):
        axis.axvline(mean, color="black", ls=(0, (1, 2)), lw=0.8)
    waits = nodes.stalled(mean)
    is_left = mean > FEW
    above.annotate(
        f"the mean in repair: waits {in_words(waits, 'share')}", (mean, waits),
        xytext=(-24 if is_left else 24, -12 if is_left else 0), textcoords="offset points",
        ha="right" if is_left else "left", va="center",
        arrowprops={"arrowstyle": "-", "lw": 0.5},
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )  # fmt: skip
