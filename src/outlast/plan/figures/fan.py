"""How far a run will be when: a fan for each strategy, and a real run over it."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from outlast import figure_style
from outlast.controller.save_schedule.schedule_explanation import span
from outlast.plan.answers import HIGH, LOW
from outlast.plan.beside import Seen
from outlast.plan.compare import Comparison
from outlast.plan.ensemble import draws, run
from outlast.plan.figures import style
from outlast.plan.job import Job
from outlast.plan.ladders import Strategy
from outlast.plan.scenario import Scenario
from outlast.plan.simulated import job_of
from outlast.plan.words import figure as said
from outlast.theory.failures import DAY_S, HOUR_S

LEVELS = 10
RUNS = 4  # in each sixteenth of the failure rates
REACH = 2.0  # times the median of the cheapest: what takes longer leaves the picture
Bands: TypeAlias = dict[Strategy, np.ndarray]
SECONDS = (1.0, "seconds")
UNITS = ((2 * DAY_S, DAY_S, "days"), (2 * HOUR_S, HOUR_S, "hours"), (120.0, 60.0, "minutes"))


def draw(
    scenario: Scenario, found: Comparison, path: Path, *, start: datetime | None, seen: Seen | None
) -> None:
    """P5 to P95 and the median of the time to each tenth of the work; days and dollars beside.
    With a run that was seen, of runs that do as much work as that one."""
    fill = partial(_fill, scenario=scenario, found=found, start=start, seen=seen)
    figure_style.save(path, fill)


def courses(
    scenario: Scenario, strategies: list[Strategy], work_s: float, seed: int
) -> dict[Strategy, np.ndarray]:
    """Seconds to each tenth of the work (rows), of runs (columns) that meet the same failures on
    the way to each."""
    jobs: dict[Strategy, Job] = {one: job_of(scenario, one) for one in strategies}
    rows: dict[Strategy, list[np.ndarray]] = {one: [] for one in strategies}
    at = draws(scenario, RUNS)
    for level in range(1, LEVELS + 1):
        part: dict[Strategy, Job] = {
            one: job._replace(work_s=work_s * level / LEVELS, flush_s=0.0)
            for one, job in jobs.items()
        }
        for one, runs in run(part, at, seed=seed).runs.items():
            rows[one].append(runs.wall_s)
    return {one: np.stack([np.zeros(len(each[0])), *each]) for one, each in rows.items()}


def _fill(
    figure: Figure,
    scenario: Scenario,
    found: Comparison,
    start: datetime | None,
    seen: Seen | None,
) -> None:
    axis = figure.subplots()
    names: list[Strategy] = [one.strategy for one in found.contenders]
    work_s = seen.work_s if seen and seen.work_s else scenario.work_s
    fans = courses(scenario, names, work_s, found.seed)
    bands: Bands = {one: _band(each) for one, each in fans.items()}
    course = np.array(seen.course if seen and seen.course else [(0.0, 0.0)])
    right_s = max(_right_s(bands), 1.03 * float(course[-1, 0]))
    size_s, unit = next(((size, one) for least, size, one in UNITS if right_s > least), SECONDS)
    shaded = {names[0], "checkpoint-restart"}
    labels: dict[Strategy, str] = {one: _said(found, one, seen) for one in names}
    _fans(axis, bands, shaded, labels, size_s, right_s)
    if seen:
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
        f"medians; P5 to P95 of {' and '.join(sorted(shaded & set(names)))} shaded", loc="left",
    )  # fmt: skip
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
    for one, band in bands.items():
        low, middle, high = np.minimum(band, 10 * right_s) / size_s  # infinity is not drawn
        colour, dashes, _ = style.LOOK[one]
        width = 2.4 if one == "outlast" else 1.2  # lies under one that it often coincides with
        if one in shaded:
            axis.fill_betweenx(progress, low, high, color=colour, alpha=0.15, lw=0)
        axis.plot(middle, progress, dashes, color=colour, lw=width, label=labels[one])


def _right_s(bands: Bands) -> float:
    """Where the picture ends: with the last run that is not out of all proportion."""
    ends = np.array([band[1:, -1] for band in bands.values()])
    shortest_s = ends[:, 0].min()
    within = ends[ends <= REACH * shortest_s]
    return 1.03 * float(within.max()) if len(within) else DAY_S


def _band(wall_s: np.ndarray) -> np.ndarray:
    return np.quantile(wall_s, (LOW, 0.5, HIGH), axis=1, method="inverted_cdf")


def _said(found: Comparison, strategy: Strategy, seen: Seen | None) -> str:
    """With days and dollars, where the picture is of the whole run."""
    if seen:
        return strategy
    one = next(each for each in found.contenders if each.strategy == strategy)
    usd = [said(each or 0.0, "USD") for each in (one.costs.low, one.costs.high)]
    return f"{strategy}: {said(one.takes.value, 's')}, {usd[0]} to {usd[1]}"


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
