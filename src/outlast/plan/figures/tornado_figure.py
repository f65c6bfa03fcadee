"""Tornado figure: the price of a run with each input halved and doubled."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from outlast import figure_style
from outlast.plan.answers.advice import Advice
from outlast.plan.answers.input_sensitivity import InputSensitivity, InputVariation, Side
from outlast.plan.model.answer_values import format_quantity as said
from outlast.plan.model.scenario import Scenario

ROWS = 10
ROW_INCH, FRAME_INCH = 0.3, 1.2
LOOK: dict[Side, tuple[str, str]] = {"half": ("#56b4e9", ""), "double": ("#e69f00", "////")}
ROOM = 0.22  # of the width, on either side, for what is written beside bars
LOG_MIN = 4.0  # from the least to the highest price: beyond, the axis is logarithmic
MANY_MIN = 100.0  # beyond, only powers of ten are ticks
WRAP = 30


class _Scale(NamedTuple):
    """Dollar axis: value at 0, start of the bars, right end."""

    zero: float
    start: float
    right: float


def draw(scenario: Scenario, advice: Advice, path: Path) -> None:
    """Draw bars in dollars from the best price, the most influential input first.

    The next worthwhile purchase is marked.
    """
    rows = advice.levers[:ROWS]
    fill = partial(_fill, scenario=scenario, advice=advice, rows=rows)
    figure_style.save(path, fill, FRAME_INCH + ROW_INCH * max(3, len(rows)))


def _fill(figure: Figure, scenario: Scenario, advice: Advice, rows: list[InputSensitivity]) -> None:
    axis = figure.subplots()
    base = advice.bill.total
    taken = f"{advice.items[0].set_to}, {said(base, 'USD')}" if advice.items else "no run ends"
    axis.set_title(f"{scenario.gpus:,} GPUs, {scenario.failures.name}: {taken}", loc="left")
    prices = [turn.usd for one in rows for _, turn in _turns(one)] + [base]
    finite = [one for one in prices if math.isfinite(one)]
    if not finite:
        axis.set_axis_off()
        axis.text(0.5, 0.5, "no input, halved or doubled, makes it end", ha="center")
        return
    scale = _scale(axis, min(finite), max(finite), base, endless=math.inf in prices)
    for row, one in enumerate(rows):
        for side, turn in _turns(one):
            _bar(axis, row, side, turn, said(turn.value, one.unit), scale)
    names = [f"{_wrapped(one.label)}: {said(one.value, one.unit)}" for one in rows]
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
    best = max((one for one in rows if one.buy), key=lambda one: one.saves_usd, default=None)
    turn = best and (best.half if best.buy == "half" else best.double)
    if best is None or turn is None:
        return
    saves = f"saves {said(best.saves_usd, 'USD')}"
    saves = "the run ends" if math.isinf(best.saves_usd) else saves
    axis.plot(
        turn.usd - scale.zero, rows.index(best), "k*", ms=7, zorder=3,
        label=f"worth buying next: {saves}",
    )  # fmt: skip


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
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: said(value, "USD")))
        axis.set_xlabel("price of the run, with the best settings for each")
        room = max(1.5, most / least) ** ROOM
        low, high, zero = least / room, most * room ** (2 if endless else 1), 0.0
    else:
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _more(value)))
        axis.set_xlabel(f"more or less than {said(base, 'USD')}, with the best settings for each")
        room = ROOM * ((most - least) or 0.01 * most)
        low, high, zero = least - base - room, most - base + room * (2 if endless else 1), base
    axis.set_xlim(low, high)
    return _Scale(zero, base - zero if math.isfinite(base) else high, high)


def _more(usd: float) -> str:
    return said(usd, "USD") if usd <= 0 else f"+{said(usd, 'USD')}"


def _bar(axis: Axes, row: int, side: Side, turn: InputVariation, text: str, scale: _Scale) -> None:
    colour, hatch = LOOK[side]
    end = min(turn.usd - scale.zero, scale.right)
    axis.barh(
        row, end - scale.start, 0.72, scale.start, color=colour, hatch=hatch, edgecolor="white",
        lw=0,
    )  # fmt: skip
    endless, below = math.isinf(turn.usd), end < scale.start
    axis.annotate(
        f"{text}: never ends" if endless else text, (end, row), (-6 if below or endless else 4, 0),
        textcoords="offset points", ha="right" if below or endless else "left", va="center",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1} if endless else None,
    )  # fmt: skip


def _wrapped(text: str) -> str:
    if len(text) <= WRAP:
        return text
    cut = text.rfind(" ", 0, len(text) // 2 + 6)
    return f"{text[:cut]}\n{text[cut + 1 :]}"
