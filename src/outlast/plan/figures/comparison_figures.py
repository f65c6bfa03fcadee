"""Figures of a comparison: progress of each strategy as a fan, lost time by cause."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from outlast import figure_style
from outlast.controller.save_schedule.save_intervals import span
from outlast.plan.answers.strategy_comparison import ComparedStrategy, StrategyComparison
from outlast.plan.figures import STRATEGY_LOOK
from outlast.plan.model.answer_values import CAUSES, HIGH, LOW, Cause, format_quantity
from outlast.plan.model.ladder_costs import Strategy
from outlast.plan.model.measured_run import MeasuredRun
from outlast.plan.model.scenario import Scenario
from outlast.plan.simulate.replications import draws, run_ensemble
from outlast.plan.simulate.simulated_job import SimulatedJob, job_of
from outlast.theory.failures import DAY_S, HOUR_S

LEVELS = 10
RUNS = 4  # in each sixteenth of the failure rates
REACH = 2.0  # axis limit, as a multiple of the cheapest strategy's median
Bands: TypeAlias = dict[Strategy, np.ndarray]
SECONDS = (1.0, "seconds")
UNITS = ((2 * DAY_S, DAY_S, "days"), (2 * HOUR_S, HOUR_S, "hours"), (120.0, 60.0, "minutes"))


def draw_fan(
    scenario: Scenario,
    found: StrategyComparison,
    path: Path,
    *,
    start: datetime | None,
    measured: MeasuredRun | None,
) -> None:
    """Draw P5 to P95 and the median of the time to each tenth of the work, by strategy.

    Days and dollars stand beside. With a measured run, of runs that do as much work as it did.
    """
    fill = partial(_fill_fan, scenario=scenario, found=found, start=start, measured=measured)
    figure_style.save(path, fill)


def courses(
    scenario: Scenario, strategies: list[Strategy], work_s: float, seed: int
) -> dict[Strategy, np.ndarray]:
    """Return seconds to each tenth of the work (rows) for runs (columns).

    The runs meet the same failures on the way to each tenth.
    """
    jobs: dict[Strategy, SimulatedJob] = {name: job_of(scenario, name) for name in strategies}
    rows: dict[Strategy, list[np.ndarray]] = {name: [] for name in strategies}
    at = draws(scenario, RUNS)
    for level in range(1, LEVELS + 1):
        part: dict[Strategy, SimulatedJob] = {
            name: job._replace(work_s=work_s * level / LEVELS, flush_s=0.0)
            for name, job in jobs.items()
        }
        for name, runs in run_ensemble(part, at, seed=seed).runs.items():
            rows[name].append(runs.wall_s)
    return {name: np.stack([np.zeros(len(each[0])), *each]) for name, each in rows.items()}


def _fill_fan(
    figure: Figure,
    scenario: Scenario,
    found: StrategyComparison,
    start: datetime | None,
    measured: MeasuredRun | None,
) -> None:
    axis = figure.subplots()
    names: list[Strategy] = [contender.strategy for contender in found.contenders]
    work_s = measured.work_s if measured and measured.work_s else scenario.work_s
    fans = courses(scenario, names, work_s, found.seed)
    bands: Bands = {name: _band(each) for name, each in fans.items()}
    course = np.array(measured.course if measured and measured.course else [(0.0, 0.0)])
    right_s = max(_right_s(bands), 1.03 * float(course[-1, 0]))
    size_s, unit = next(((size, name) for least, size, name in UNITS if right_s > least), SECONDS)
    shaded = {names[0], "checkpoint-restart"}
    labels: dict[Strategy, str] = {name: _legend_text(found, name, measured) for name in names}
    _fans(axis, bands, shaded, labels, size_s, right_s)
    if measured:
        axis.plot(course[:, 0] / size_s, course[:, 1] / work_s, color="black", label="the run")
    axis.set_xlim(0, right_s / size_s)
    axis.set_ylim(0, 1)
    axis.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    axis.set_ylabel("work done")
    axis.set_xlabel(f"{unit} since the start")
    if start is not None:
        _dates(axis, start, size_s)
    axis.set_title(
        f"{scenario.gpus:,} GPUs, {scenario.failures.name}, {span(work_s)} of work\n"
        f"medians; P5 to P95 of {' and '.join(sorted(shaded & set(names)))} shaded",
        loc="left",
    )
    axis.legend(
        loc="lower right",
        fontsize=7,
        handlelength=3.2,
        frameon=True,
        framealpha=1,
        edgecolor="none",
    )


def _fans(
    axis: Axes,
    bands: Bands,
    shaded: set[str],
    labels: dict[Strategy, str],
    size_s: float,
    right_s: float,
) -> None:
    progress = np.linspace(0, 1, LEVELS + 1)
    for name, band in bands.items():
        low, middle, high = np.minimum(band, 10 * right_s) / size_s  # infinity is not drawn
        colour, dashes, _ = STRATEGY_LOOK[name]
        width = 2.4 if name == "outlast" else 1.2  # drawn under a line that often coincides
        if name in shaded:
            axis.fill_betweenx(progress, low, high, color=colour, alpha=0.15, lw=0)
        axis.plot(middle, progress, dashes, color=colour, lw=width, label=labels[name])


def _right_s(bands: Bands) -> float:
    """Return the right end of the time axis: the last run that is not an extreme outlier."""
    ends = np.array([band[1:, -1] for band in bands.values()])
    shortest_s = ends[:, 0].min()
    within = ends[ends <= REACH * shortest_s]
    return 1.03 * float(within.max()) if len(within) else DAY_S


def _band(wall_s: np.ndarray) -> np.ndarray:
    return np.quantile(wall_s, (LOW, 0.5, HIGH), axis=1, method="inverted_cdf")


def _legend_text(
    found: StrategyComparison, strategy: Strategy, measured: MeasuredRun | None
) -> str:
    """Return the label of a strategy, with days and dollars for a whole run."""
    if measured:
        return strategy
    contender = next(each for each in found.contenders if each.strategy == strategy)
    usd = [
        format_quantity(each or 0.0, "USD") for each in (contender.costs.low, contender.costs.high)
    ]
    return f"{strategy}: {format_quantity(contender.takes.value, 's')}, {usd[0]} to {usd[1]}"


def _dates(axis: Axes, start: datetime, size_s: float) -> None:
    above = axis.secondary_xaxis(
        "top",
        functions=(
            lambda at: np.asarray(at) * size_s / DAY_S + date2num(start),
            lambda date: (np.asarray(date) - date2num(start)) * DAY_S / size_s,
        ),
    )
    locator = AutoDateLocator(maxticks=8)
    above.xaxis.set_major_locator(locator)
    above.xaxis.set_major_formatter(ConciseDateFormatter(locator))


# The hatches distinguish causes in grey print.
LOOK: dict[Cause, tuple[str, str]] = {
    "save": ("#56b4e9", ""),
    "redo": ("#d55e00", "////"),
    "detect": ("#f0e442", "...."),
    "restart": ("#0072b2", "\\\\\\\\"),
    "wait": ("#cc79a7", "xxxx"),
    "slow": ("#999999", "----"),
}
ROW_INCH = 0.42
FRAME_INCH = 1.3
WRITTEN_MIN = 0.085  # of the widest bar: narrower parts have no room for a figure
ROOM = 1.42  # of the widest bar: room for the text behind it


def draw_waterfall(scenario: Scenario, found: StrategyComparison, path: Path) -> None:
    """Draw mean shares of wall time, with goodput and its price behind each bar."""
    fill = partial(_fill_waterfall, scenario=scenario, found=found)
    figure_style.save(path, fill, FRAME_INCH + ROW_INCH * max(2, len(found.contenders)))


def _fill_waterfall(figure: Figure, scenario: Scenario, found: StrategyComparison) -> None:
    axis = figure.subplots()
    widest = max((1 - row.shares["work"] for row in found.contenders), default=0.0) or 1.0
    named: set[Cause] = set()
    for row, contender in enumerate(found.contenders):
        offset = 0.0
        for cause in CAUSES[1:]:
            share = contender.shares[cause]
            if not share:
                continue
            colour, hatch = LOOK[cause]
            axis.barh(
                row,
                share,
                0.62,
                offset,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                lw=0,
                label=cause if cause not in named else None,
            )
            named.add(cause)
            if share > WRITTEN_MIN * widest:
                axis.text(
                    offset + share / 2,
                    row,
                    format_quantity(share, "share"),
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    bbox={"fc": "white", "ec": "none", "pad": 0.8, "alpha": 0.85},
                )
            offset += share
        axis.text(offset + 0.015 * widest, row, _outcome(contender), va="center", fontsize=7)
    axis.set_yticks(range(len(found.contenders)), [item.strategy for item in found.contenders])
    axis.tick_params("y", length=0)
    axis.invert_yaxis()
    axis.set_xlim(0, ROOM * widest)
    ticks = MaxNLocator(6).tick_values(0, ROOM * widest)
    axis.set_xticks([tick for tick in ticks if tick <= min(1.0, ROOM * widest)])
    axis.xaxis.set_major_formatter(
        PercentFormatter(1, decimals=0 if widest > 0.05 else 2, symbol=" %")
    )
    axis.set_xlabel("share of wall time, mean")
    axis.set_title(f"{scenario.gpus:,} GPUs, {scenario.failures.name}: lost time", loc="left")
    figure.legend(loc="outside lower center", ncols=len(LOOK), handlelength=1.6)


def _outcome(contender: ComparedStrategy) -> str:
    return (
        f"{format_quantity(contender.shares['work'], 'share')} work\n"
        f"{format_quantity(contender.takes.value, 's')},"
        f" {format_quantity(contender.costs.value, 'USD')}"
    )
