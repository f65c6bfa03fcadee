"""Figures of the report's sections, in the style of `outlast.drawing`.

matplotlib is imported where something is drawn, so that a report as JSON needs none.
"""

from __future__ import annotations

import math
from itertools import cycle
from typing import TYPE_CHECKING

import polars as pl

from outlast.fleet.analysis.failure_attribution import UNATTRIBUTED
from outlast.fleet.analysis.failure_rates import ALL, FailureRate
from outlast.text_formatting import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours; infrastructure in vermilion throughout.
BLUE, LIGHT, ORANGE, RED, GREEN, GREY = (
    "#0072b2",
    "#56b4e9",
    "#e69f00",
    "#d55e00",
    "#009e73",
    "#999999",
)
STATES = (BLUE, LIGHT, "#b3d4e8", GREEN, "#cccccc", GREY, "#f0e442", "#cc79a7", "#4d4d4d")
LINES = ("-", "--", "-.", ":")
LINE_COLOURS = (BLUE, ORANGE, GREEN, "#cc79a7", LIGHT)
CAUSES_MAX = 5  # drawn as separate lines


def draw_states(table: pl.DataFrame, figure: Figure) -> None:
    """Draw attempts and GPU time by state, with those ended by infrastructure on the right."""
    axes = figure.subplots()
    ordered = table.sort(["hw", "gpu_hours_share"], descending=[False, True])
    for row, column in enumerate(("gpu_hours_share", "jobs_share")):
        offset = 0.0
        shades = cycle(STATES)
        for state, hw, width in ordered.select("state", "hw", column).iter_rows():
            colour = RED if hw else next(shades)
            label = "ended by infrastructure" if hw else state.lower().replace("_", " ")
            axes.barh(
                row,
                width,
                left=offset,
                color=colour,
                edgecolor="white",
                linewidth=0.5,
                label=None if row else label,
            )
            if width > 0.06:
                text = f"{state.lower().replace('_', ' ')}\n{width:.0%}"
                ink = "white" if colour in (BLUE, RED, GREEN) else "black"
                at = offset + width / 2
                axes.text(at, row, text, ha="center", va="center", fontsize=6, color=ink)
            offset += width
    axes.set_yticks([0, 1], ["GPU time", "attempts"])
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    figure.legend(once.values(), once.keys(), loc="outside lower center", ncols=5, fontsize=7)


def draw_causes(table: pl.DataFrame, figure: Figure) -> None:
    """Draw rates by cause with their intervals, the most frequent on top."""
    axes = figure.subplots()
    shown = table.filter(pl.col("cause") != ALL).sort("per_gpu_hour")
    names = shown["cause"].to_list()
    rates = shown["per_gpu_hour"].to_list()
    low = shown["per_gpu_hour_low"].to_list()
    high = shown["per_gpu_hour_high"].to_list()
    colours = [GREY if name == UNATTRIBUTED else RED for name in names]
    axes.barh(names, rates, color=colours, height=0.6)
    for row, (rate, least, most) in enumerate(zip(rates, low, high, strict=True)):
        axes.errorbar(rate, row, xerr=[[rate - least], [most - rate]], color="black", linewidth=0.8)
    axes.set_xlabel("failures in a million GPU hours, with 90 % intervals")


def draw_rate_history(table: pl.DataFrame, new: pl.DataFrame, figure: Figure) -> None:
    """Draw all failures, the most frequent causes, and the days of new checks."""
    from matplotlib.dates import ConciseDateFormatter

    axes = figure.subplots()
    often = (
        table.filter(pl.col("cause") != ALL)
        .group_by("cause")
        .agg(pl.col("failures").sum())
        .sort("failures", descending=True)["cause"]
        .head(CAUSES_MAX)
    )
    for at, name in enumerate([ALL, *often]):
        line = table.filter(pl.col("cause") == name).sort("day")
        colour = "black" if name == ALL else LINE_COLOURS[(at - 1) % len(LINE_COLOURS)]
        axes.plot(
            line["day"].to_list(),
            line["per_1000_node_days"].to_list(),
            label=name,
            color=colour,
            linestyle=LINES[at % len(LINES)],
            linewidth=1.4 if name == ALL else 1.0,
        )
    for check, day in new.select("check", "day").iter_rows():
        axes.axvline(day, color=GREY, linewidth=0.8)
        axes.text(day, axes.get_ylim()[1], f" {check}", rotation=90, va="top", fontsize=6)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("failures in 1000 node-days")
    axes.legend(ncols=3, fontsize=7)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(axes.xaxis.get_major_locator()))


def draw_sizes(table: pl.DataFrame, figure: Figure) -> None:
    """Draw the shares of attempts and of GPU time by size."""
    axes = figure.subplots()
    places = list(range(len(table)))
    _draw_pairs(axes, places, table, ("jobs_share", "gpu_hours_share"), ("attempts", "GPU time"))
    axes.set_xticks(places, [f"{gpus:,}" for gpus in table["gpus"]])
    axes.set_xlabel("GPUs, rounded up to a power of two")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend()


def draw_mttf(table: pl.DataFrame, rate: FailureRate, figure: Figure) -> None:
    """Draw the MTTF of each size with its interval, and the projection from large jobs."""
    axes = figure.subplots()
    observed = table.filter(pl.col("failures") > 0, pl.col("gpus") > 0)
    for gpus, hours, low, high in observed.select("gpus", "mttf_h", "low_h", "high_h").iter_rows():
        axes.plot([gpus, gpus], [low, high], color=BLUE, linewidth=1)
        axes.plot(gpus, hours, "o", color=BLUE, markersize=3.5)
    none = table.filter(pl.col("failures") == 0, pl.col("low_h").is_not_null(), pl.col("gpus") > 0)
    if len(none):
        axes.plot(
            none["gpus"].to_list(),
            none["low_h"].to_list(),
            "^",
            color=GREY,
            markersize=4,
            label="none failed: above this, with 95 %",
        )
    line = table.filter(pl.col("projected_h").is_not_null(), pl.col("gpus") > 0).sort("gpus")
    if len(line):
        at = line["gpus"].to_list()
        axes.plot(at, line["projected_h"].to_list(), "--", color=RED, linewidth=1, label=_r_f(rate))
        low = line["projected_low_h"].to_list()
        high = line["projected_high_h"].to_list()
        axes.fill_between(at, low, high, color=RED, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.set_xlabel("GPUs")
    axes.set_ylabel("hours to failure, with 90 % intervals")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def draw_ettr(table: pl.DataFrame, figure: Figure) -> None:
    """Draw the measured ETTR with its interval, and the expected ones as lines."""
    axes = figure.subplots()
    at = table["bucket"].to_list()
    for gpus, mean, low, high in table.select("bucket", "ettr", "low", "high").iter_rows():
        if low is not None:
            axes.plot([gpus, gpus], [low, high], color=BLUE, linewidth=1)
        axes.plot(gpus, mean, "o", color=BLUE, markersize=4)
    axes.plot([], [], "o-", color=BLUE, markersize=4, label="measured, mean with its 90 % interval")
    axes.plot(at, table["exact"].to_list(), "-", color=RED, linewidth=1, label="expected, exact")
    axes.plot(
        at, table["expected"].to_list(), ":", color=RED, linewidth=1, label="equations 4 to 6"
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("GPUs of the job run")
    axes.set_ylabel("ETTR")
    axes.legend(loc="lower left")


def draw_goodput(table: pl.DataFrame, figure: Figure) -> None:
    """Draw the lost GPU hours by size, second order on top of first."""
    axes = figure.subplots()
    places = list(range(len(table)))
    first = table["first_gpu_s"].to_list()
    second = table["second_gpu_s"].to_list()
    axes.bar(places, first, color=RED, width=0.7, label="failed (first order)")
    axes.bar(
        places,
        second,
        bottom=first,
        color=ORANGE,
        width=0.7,
        hatch="//",
        edgecolor="white",
        label="preempted for these (second order)",
    )
    axes.set_xticks(places, [f"{bucket:,}" for bucket in table["bucket"]])
    axes.set_xlabel("GPUs of the job that lost it, rounded up to a power of two")
    axes.set_ylabel("GPU hours lost")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.legend()


def draw_lemons(table: pl.DataFrame, figure: Figure) -> None:
    """Draw the number of nodes by failures, beside the one expected by chance."""
    axes = figure.subplots()
    counts = table.with_columns(pl.col("failures").round().cast(pl.Int64))
    most = max(2, int(counts["failures"].max() or 0))  # type: ignore[arg-type]
    places = list(range(most + 1))
    highest = 1
    for called, shift, colour, noun in ((False, -0.2, BLUE, "node"), (True, 0.2, RED, "lemon")):
        group = counts.filter(pl.col("lemon") == called)["failures"]
        bars = [int((group == place).sum()) for place in places]
        label = plural(len(group), noun)
        axes.bar([place + shift for place in places], bars, color=colour, width=0.38, label=label)
        highest = max(highest, *bars)
    means = table["expected"].to_list()
    chance = [
        sum(math.exp(k * math.log(m) - m - math.lgamma(k + 1)) for m in means if m) for k in places
    ]
    axes.plot(places, chance, "o--", color="black", linewidth=0.8, markersize=3, label="by chance")
    axes.set_yscale("log")
    axes.set_ylim(0.3, 2 * highest)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.set_xlabel("failures of a node")
    axes.set_ylabel("nodes")
    axes.legend()


def draw_parts(table: pl.DataFrame, figure: Figure) -> None:
    """Draw the shares of lemons by part, beside the paper's."""
    axes = figure.subplots()
    places = list(range(len(table)))
    shown = table.with_columns(pl.col("paper").fill_null(0.0))
    _draw_pairs(axes, places, shown, ("paper", "share"), ("RSC-1 and RSC-2 (Table II)", "here"))
    axes.set_xticks(places, shown["part"].to_list())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylabel("of the lemons")
    axes.legend()


def draw_signals(steps: pl.DataFrame, figure: Figure) -> None:
    """Draw the share of nodes up to each value of a signal, and the lemons' values."""
    axes = figure.subplots()
    names = steps["signal"].unique(maintain_order=True).to_list()
    for at, name in enumerate(names):
        line = steps.filter(pl.col("signal") == name)
        colour = LINE_COLOURS[at % len(LINE_COLOURS)]
        style = LINES[at // len(LINE_COLOURS) % len(LINES)]
        x = line["of_largest"].to_list()
        y = line["nodes_share"].to_list()
        axes.step(x, y, style, where="post", color=colour, linewidth=1, label=name)
        hit = line.filter(pl.col("lemons") > 0)
        axes.plot(
            hit["of_largest"].to_list(), hit["nodes_share"].to_list(), "x", color=RED, markersize=4
        )
    axes.plot([], [], "x", color=RED, markersize=4, label="lemons")
    axes.set_xlabel("value of the signal, of its largest")
    axes.set_ylabel("nodes up to it")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.legend(fontsize=6)


def draw_bandwidth(points: pl.DataFrame, figure: Figure) -> None:
    """Draw bandwidths by iteration of one group, and the sorted medians of groups, by label."""
    panels = points["panel"].unique(maintain_order=True).sort(descending=True).to_list()
    several = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(several, panels, strict=True):
        some = points.filter(pl.col("panel") == panel)
        for at, name in enumerate(some["label"].unique().sort()):
            line = some.filter(pl.col("label") == name)
            colour = LINE_COLOURS[at % len(LINE_COLOURS)]
            axes.plot(
                line["at"].to_list(),
                line["gb_per_s"].to_list(),
                "o" + LINES[at // len(LINE_COLOURS) % len(LINES)],
                color=colour,
                linewidth=1,
                markersize=3,
                label=name or "no label",
            )
            if panel == "groups":
                hit = line.filter("slow")
                axes.plot(hit["at"].to_list(), hit["gb_per_s"].to_list(), "x", color=RED)
        setting = some.row(0, named=True)
        axes.set_title(
            f"{setting['collective']} of {plural(setting['ranks'], 'rank')},"
            f" {setting['size_bytes']:,} B",
            fontsize=7,
        )
        axes.set_ylim(bottom=0)
        axes.set_xlabel("iteration" if panel == "iterations" else "groups, the slowest first")
    several[0].set_ylabel("bus bandwidth, GB/s")
    several[-1].legend(fontsize=6)


def _draw_pairs(
    axes: Axes,
    places: list[int],
    of: pl.DataFrame,
    columns: tuple[str, str],
    names: tuple[str, str],
) -> None:
    for shift, column, name, colour in zip((-0.2, 0.2), columns, names, (LIGHT, BLUE), strict=True):
        at = [place + shift for place in places]
        axes.bar(at, of[column].to_list(), width=0.38, color=colour, label=name)


def _r_f(rate: FailureRate) -> str:
    return (
        f"1/N from {rate.per_1000_node_days:.2f} failures in 1000 node-days"
        f" (jobs above {rate.above_gpus:,} GPUs)"
    )
