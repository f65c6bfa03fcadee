"""Figures of cost: a run's price by input (tornado), waiting and dollars by spares."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from outlast import figure_style
from outlast.errors import UsageError
from outlast.plan.answers.advice import Advice, InputSensitivity, InputVariation, Side
from outlast.plan.answers.spare_nodes import SpareModel, cheapest, plain_usd, whole_replicas
from outlast.plan.model.answer_values import format_quantity
from outlast.plan.model.scenario import Scenario

ROWS = 10
ROW_INCH = 0.3
FRAME_INCH = 1.2
LOOK: dict[Side, tuple[str, str]] = {"half": ("#56b4e9", ""), "double": ("#e69f00", "////")}
ROOM = 0.22  # of the width: room on either side for text beside bars
LOG_MIN = 4.0  # from the least to the highest price: beyond, the axis is logarithmic
MANY_MIN = 100.0  # beyond, only powers of ten are ticks
WRAP = 30


class _Scale(NamedTuple):
    """Dollar axis: value at 0, start of the bars, right end."""

    zero: float
    start: float
    right: float


def draw_tornado(scenario: Scenario, advice: Advice, path: Path) -> None:
    """Draw bars in dollars from the best price, the most influential input first.

    The next worthwhile purchase is marked.
    """
    rows = advice.levers[:ROWS]
    fill = partial(_fill_tornado, scenario=scenario, advice=advice, rows=rows)
    figure_style.save(path, fill, FRAME_INCH + ROW_INCH * max(3, len(rows)))


def _fill_tornado(
    figure: Figure, scenario: Scenario, advice: Advice, rows: list[InputSensitivity]
) -> None:
    axis = figure.subplots()
    base = advice.bill.total
    price = format_quantity(base, "USD")
    taken = f"{advice.items[0].set_to}, {price}" if advice.items else "no run ends"
    axis.set_title(f"{scenario.gpus:,} GPUs, {scenario.failures.name}: {taken}", loc="left")
    prices = [turn.usd for lever in rows for _, turn in _turns(lever)] + [base]
    finite = [price for price in prices if math.isfinite(price)]
    if not finite:
        axis.set_axis_off()
        axis.text(0.5, 0.5, "no input, halved or doubled, makes it end", ha="center")
        return
    scale = _scale(axis, min(finite), max(finite), base, endless=math.inf in prices)
    for row, lever in enumerate(rows):
        for side, turn in _turns(lever):
            _bar(axis, row, side, turn, format_quantity(turn.value, lever.unit), scale)
    names = [
        f"{_wrapped(lever.label)}: {format_quantity(lever.value, lever.unit)}" for lever in rows
    ]
    axis.set_yticks(range(len(rows)), names)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    if math.isfinite(base):
        axis.axvline(base - scale.zero, color="black", lw=0.8)
    _legend(axis, rows, scale)
    figure.legend(loc="outside lower center", ncols=3)


def _legend(axis: Axes, rows: list[InputSensitivity], scale: _Scale) -> None:
    for side, (colour, hatch) in LOOK.items():
        axis.bar(
            scale.start, 0, color=colour, hatch=hatch, edgecolor="white", label=f"input at {side}"
        )
    best = max((row for row in rows if row.buy), key=lambda row: row.saves_usd, default=None)
    turn = best and (best.half if best.buy == "half" else best.double)
    if best is None or turn is None:
        return
    saves = f"saves {format_quantity(best.saves_usd, 'USD')}"
    saves = "the run ends" if math.isinf(best.saves_usd) else saves
    axis.plot(
        turn.usd - scale.zero,
        rows.index(best),
        "k*",
        ms=7,
        zorder=3,
        label=f"worth buying next: {saves}",
    )


def _turns(lever: InputSensitivity) -> list[tuple[Side, InputVariation]]:
    sides: list[tuple[Side, InputVariation | None]] = [
        ("half", lever.half),
        ("double", lever.double),
    ]
    return [(side, turn) for side, turn in sides if turn]


def _scale(axis: Axes, least: float, most: float, base: float, *, endless: bool) -> _Scale:
    """Return a linear axis of differences, or for large ones a logarithmic axis of prices.

    It leaves room for labels. Bars of runs without end reach to the right end.
    """
    if most > LOG_MIN * least or math.isinf(base):
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(
            LogLocator(subs=(1, 2, 5) if most < MANY_MIN * least else (1,))
        )
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(_dollars))
        axis.set_xlabel("price of the run, with the best settings for each")
        room = max(1.5, most / least) ** ROOM
        low = least / room
        high = most * room ** (2 if endless else 1)
        zero = 0.0
    else:
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _more(value)))
        axis.set_xlabel(f"difference to {_dollars(base)}, with the best settings for each")
        room = ROOM * ((most - least) or 0.01 * most)
        low = least - base - room
        high = most - base + room * (2 if endless else 1)
        zero = base
    axis.set_xlim(low, high)
    return _Scale(zero, base - zero if math.isfinite(base) else high, high)


def _dollars(usd: float, _tick: int = 0) -> str:
    return format_quantity(usd, "USD")


def _more(usd: float) -> str:
    return _dollars(usd) if usd <= 0 else f"+{_dollars(usd)}"


def _bar(axis: Axes, row: int, side: Side, turn: InputVariation, text: str, scale: _Scale) -> None:
    colour, hatch = LOOK[side]
    end = min(turn.usd - scale.zero, scale.right)
    axis.barh(
        row,
        end - scale.start,
        0.72,
        scale.start,
        color=colour,
        hatch=hatch,
        edgecolor="white",
        lw=0,
    )
    endless = math.isinf(turn.usd)
    below = end < scale.start
    axis.annotate(
        f"{text}: never ends" if endless else text,
        (end, row),
        (-6 if below or endless else 4, 0),
        textcoords="offset points",
        ha="right" if below or endless else "left",
        va="center",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1} if endless else None,
    )


def _wrapped(text: str) -> str:
    if len(text) <= WRAP:
        return text
    cut = text.rfind(" ", 0, len(text) // 2 + 6)
    return f"{text[:cut]}\n{text[cut + 1 :]}"


POINTS = 160
LEAST = 1e-5  # of time: smaller shares are not drawn
HEIGHT_INCH = 5.2
FEW = 30  # spares, to the left of which no label has room
NODES = "#0072b2"
REPLICAS = "#d55e00"
GOING_ON = "#009e73"


def draw_spares(scenario: Scenario, path: Path) -> None:
    """Draw the share of time that a job waits, and below it the cost of spares and waiting.

    Raises UsageError where no run ends.
    """
    if math.isinf(plain_usd(scenario, SpareModel(scenario))):
        raise UsageError("--figure: no run ends here with any spares: there is no cost to draw")
    figure_style.save(path, partial(_fill_spares, scenario=scenario), HEIGHT_INCH)


def _fill_spares(figure: Figure, scenario: Scenario) -> None:
    above, below = figure.subplots(2, 1, sharex=True)
    nodes = SpareModel(scenario)
    size = scenario.nodes // scenario.replicas
    once_usd = plain_usd(scenario, nodes)
    most = nodes.most
    _costs(below, nodes, 1, once_usd, NODES)
    above.plot(*_waits(nodes, 1), color=NODES, label="nodes, the job waits")
    if scenario.replicas > 1:
        _costs(below, nodes, 1, once_usd, GOING_ON, ":", dropping=True)
        below.plot([], [], color=GOING_ON, ls=":", label="nodes, it continues without")
        if size > 1:
            replicas = whole_replicas(scenario)
            _costs(below, replicas, size, once_usd, REPLICAS, "--")
            above.plot(
                *_waits(replicas, size),
                color=REPLICAS,
                ls="--",
                label=f"replicas of {size:,} nodes, the job waits",
            )
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
        f" {format_quantity(scenario.repair_s, 's')} of repair; dots: cheapest",
        loc="left",
    )
    below.set_yscale("log")
    below.set_ylim(bottom=below.get_ylim()[0] / 2)  # room for the numbers at the dots
    below.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    below.yaxis.set_major_formatter(FuncFormatter(_dollars))
    for axis in (below.xaxis, below.yaxis):
        axis.set_minor_formatter(NullFormatter())
    below.set_xlabel("spare nodes")
    below.set_ylabel("cost of spares, waiting and idling")
    figure.legend(loc="outside lower center", ncols=3)


def _counts(most: int) -> list[int]:
    """Return whole numbers from 0 on, evenly spaced on a logarithmic axis."""
    return sorted({0, *(int(count) for count in np.geomspace(1, most, POINTS))})


def _waits(stocks: SpareModel, size: int) -> tuple[list[int], list[float]]:
    counts = _counts(stocks.most)
    return [size * count for count in counts], [stocks.stalled(count) for count in counts]


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

    counts = _counts(stocks.most)
    best = cheapest([stocks], dropping=dropping)
    axis.plot([size * n for n in counts], [usd(n) for n in counts], color=colour, ls=line)
    axis.plot(size * best, usd(best), "o", color=colour, ms=4, mec="black", mew=0.6)
    is_left = dropping
    axis.annotate(
        f"{size * best:,}",
        (size * best, usd(best)),
        xytext=(-5 if is_left else 5, -3),
        textcoords="offset points",
        ha="right" if is_left else "left",
        va="top",
        color=colour,
    )


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
        f"the mean in repair: waits {format_quantity(waits, 'share')}",
        (mean, waits),
        xytext=(-24 if is_left else 24, -12 if is_left else 0),
        textcoords="offset points",
        ha="right" if is_left else "left",
        va="center",
        arrowprops={"arrowstyle": "-", "lw": 0.5},
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )
