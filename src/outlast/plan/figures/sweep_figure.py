"""Figure of a sweep: lines over one field, a map for each strategy over two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from outlast import figure_style
from outlast.plan.answers.parameter_sweep import PointResult, Sweep, SweepPoint
from outlast.plan.figures import STRATEGY_LOOK
from outlast.plan.model.answer_values import Unit, format_quantity
from outlast.plan.model.ladder_costs import Strategy
from outlast.plan.model.scenario import KEYS
from outlast.plan.simulate.result_tables import point_value

Measure = Literal["goodput", "dollars"]
UNITS: dict[Measure, Unit] = {"goodput": "share", "dollars": "USD"}
NAMES: dict[Measure, str] = {"goodput": "goodput", "dollars": "dollars for the run"}
BRIGHT_IS_GOOD: dict[Measure, str] = {"goodput": "cividis", "dollars": "cividis_r"}
LOG_MIN = 8.0  # from the smallest to the largest
TICKS_MAX = 9
COLUMNS_MAX = 10
ROWS_MAX = 16
MAPS_A_ROW = 3
CAPTION_MAX = 60


def draw(wanted: Sequence[SweepPoint], found: Sweep, measure: Measure, path: Path) -> None:
    """Draw theory as lines with P5 to P95 of the runs, or maps of medians over two fields.

    Maps show theory where there are no runs. Cells without a figure or an end stay empty.
    """
    if len(found.over) == 1:
        figure_style.save(path, partial(_lines, wanted=wanted, found=found, measure=measure))
        return
    rows = math.ceil(len(found.strategies) / MAPS_A_ROW)
    height_inch = figure_style.HEIGHT_INCH if rows == 1 else 2.6 * rows
    fill = partial(_maps, wanted=wanted, found=found, measure=measure)
    figure_style.save(path, fill, height_inch)


# --- one field ---


def _lines(figure: Figure, wanted: Sequence[SweepPoint], found: Sweep, measure: Measure) -> None:
    axis = figure.subplots()
    key = next(iter(found.over))
    at, ordered = _places(wanted, key)
    every: list[float] = []
    for strategy in found.strategies:
        colour, line, marker = STRATEGY_LOOK[strategy]
        here = sorted(
            (point for point in found.points if point.strategy == strategy),
            key=lambda point: at[point.values[key]],
        )
        x = np.array([at[point.values[key]] for point in here])
        theory = np.array([_theory(point, measure) for point in here])
        width = 3.2 if _covered(found, strategy, measure) else 1.2
        axis.plot(
            x,
            theory,
            color=colour,
            ls=line if ordered else "",
            lw=width,
            marker=marker,
            ms=2.4 + width,
            label=strategy,
        )
        low, middle, high = np.array([_runs(point, measure) for point in here]).T
        some = np.isfinite(high)
        axis.errorbar(
            x[some],
            middle[some],
            yerr=(middle[some] - low[some], high[some] - middle[some]),
            fmt="none",
            ecolor=colour,
            elinewidth=0.9,
            capsize=2.5,
        )
        every += [*theory[np.isfinite(theory)].tolist(), *middle[some].tolist()]
    _along(axis, at)
    axis.set_xlabel(_field(key))
    axis.set_ylabel(NAMES[measure])
    if measure == "goodput":
        axis.set_ylim(0, 1.02)
    elif every and max(every) / min(every) >= LOG_MIN:
        axis.set_yscale("log")
    _caption(axis.yaxis, measure)
    axis.grid(visible=True, axis="y", lw=0.3, color="#cccccc")
    axis.set_title(_title(wanted, found), loc="left")
    figure.legend(loc="outside lower center", ncols=len(found.strategies))


def _covered(found: Sweep, strategy: Strategy, measure: Measure) -> bool:
    """Return whether a line drawn later covers this one, which must then be wider."""
    lines = {
        name: np.array([_theory(p, measure) for p in found.points if p.strategy == name])
        for name in found.strategies[found.strategies.index(strategy) :]
    }
    own = lines.pop(strategy)
    return any(np.allclose(own, line, rtol=0.005, equal_nan=True) for line in lines.values())


def _places(wanted: Sequence[SweepPoint], key: str) -> tuple[dict[str, float], bool]:
    """Return the position of each value, and whether positions are numbers (else ordinals)."""
    numbers = {point.values[key]: point_value(point, key) for point in wanted}
    if any(value is None for value in numbers.values()):
        return {text: float(at) for at, text in enumerate(numbers)}, False
    return {text: float(value or 0) for text, value in numbers.items()}, True


def _along(axis: Axes, at: dict[str, float]) -> None:
    """Set ticks at the values, labelled with their texts as given."""
    low = min(at.values())
    high = max(at.values())
    if low > 0 and high / low >= LOG_MIN:
        axis.set_xscale("log")
    texts = list(at)[:: math.ceil(len(at) / TICKS_MAX)]
    axis.set_xticks([at[text] for text in texts], texts)
    axis.set_xticks([], minor=True)


# --- two fields ---


def _maps(figure: Figure, wanted: Sequence[SweepPoint], found: Sweep, measure: Measure) -> None:
    across = min(MAPS_A_ROW, len(found.strategies))
    rows = math.ceil(len(found.strategies) / across)
    axes = figure.subplots(rows, across, squeeze=False, sharey=True)
    grids = {strategy: _grid(found, strategy, measure) for strategy in found.strategies}
    scale = _scale(np.concatenate([grid[np.isfinite(grid)] for grid in grids.values()]), measure)
    cmap = BRIGHT_IS_GOOD[measure]
    for axis, (strategy, grid) in zip(axes.flat, grids.items(), strict=False):
        _map(axis, found, grid, scale, cmap)
        axis.set_title(strategy, loc="left")
        if grid.shape[1] * across <= COLUMNS_MAX and grid.shape[0] * rows <= ROWS_MAX:
            _figures(axis, grid, scale, measure)
    for axis in axes.flat[len(grids) :]:
        axis.set_axis_off()
    x_key, y_key = found.over
    figure.supxlabel(_field(x_key), fontsize=8)
    figure.supylabel(_field(y_key), fontsize=8)
    figure.suptitle(_title(wanted, found), x=0.01, ha="left", fontsize=9)
    bar = figure.colorbar(ScalarMappable(scale, cmap), ax=axes, label=NAMES[measure])
    _caption(bar.ax.yaxis, measure)


def _grid(found: Sweep, strategy: Strategy, measure: Measure) -> np.ndarray:
    x_key, y_key = found.over
    values = {
        (point.values[y_key], point.values[x_key]): _middle(point, measure)
        for point in found.points
        if point.strategy == strategy
    }
    return np.array([[values[y, x] for x in found.over[x_key]] for y in found.over[y_key]])


def _scale(values: np.ndarray, measure: Measure) -> Normalize:
    if measure == "goodput" or not len(values):
        return Normalize(0, 1)
    low = float(values.min())
    high = float(values.max())
    return LogNorm(low, high) if high / low >= LOG_MIN else Normalize(low, max(high, 1.01 * low))


def _map(axis: Axes, found: Sweep, grid: np.ndarray, scale: Normalize, cmap: str) -> None:
    axis.set_facecolor("#dddddd")
    axis.imshow(np.ma.masked_invalid(grid), cmap=cmap, norm=scale, origin="lower", aspect="auto")
    for ticks, texts in zip((axis.set_xticks, axis.set_yticks), found.over.values(), strict=True):
        every = math.ceil(len(texts) / TICKS_MAX)
        ticks(range(0, len(texts), every), texts[::every])
    for label in axis.get_xticklabels():
        label.set(rotation=60, ha="right", rotation_mode="anchor")


def _figures(axis: Axes, grid: np.ndarray, scale: Normalize, measure: Measure) -> None:
    for (row, column), value in np.ndenumerate(grid):
        ends = math.isfinite(value)
        dark = ends and (float(scale(value)) < 0.5) == (measure == "goodput")
        axis.text(
            column,
            row,
            format_quantity(value, UNITS[measure]) if ends else "-",
            ha="center",
            va="center",
            fontsize=6.5,
            color="white" if dark else "black",
        )


# --- both ---


def _theory(point: PointResult, measure: Measure) -> float:
    if point.theory is None:
        return math.nan
    return point.theory.outcome.goodput if measure == "goodput" else point.theory.usd


def _runs(point: PointResult, measure: Measure) -> tuple[float, float, float]:
    if point.runs is None:
        return math.nan, math.nan, math.nan
    tally = point.runs.goodput if measure == "goodput" else point.runs.costs
    return tally.low, tally.middle, tally.high


def _middle(point: PointResult, measure: Measure) -> float:
    return _theory(point, measure) if point.runs is None else _runs(point, measure)[1]


def _caption(axis: Axis, measure: Measure) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_quantity(value, UNITS[measure])))
    axis.set_minor_formatter(FuncFormatter(lambda _value, _: ""))


def _field(key: str) -> str:
    more = KEYS[key].description.partition(", as in")[0]
    return key if len(more) > CAPTION_MAX else f"{key}: {more}"


def _title(wanted: Sequence[SweepPoint], found: Sweep) -> str:
    scenario = wanted[0].scenario
    known = {"gpus": f"{scenario.gpus:,} GPUs", "failures": scenario.failures.name}
    parts = [text for key, text in known.items() if key not in found.over]
    if found.requested:
        bars = "bars: P5 to P95 of" if len(found.over) == 1 else "median of"
        parts.append(f"{bars} {found.requested:,} runs")
    return ", ".join([*parts, *["by theory"] * (not found.requested)])
