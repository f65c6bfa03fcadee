"""Where wall time goes that is no useful work, by cause, a bar for each strategy."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from outlast import figure_style
from outlast.plan.compare import Comparison, Contender
from outlast.plan.ensemble import CAUSES, Cause
from outlast.plan.scenario import Scenario
from outlast.plan.words import figure as said

# Told apart in grey by how they are hatched.
LOOK: dict[Cause, tuple[str, str]] = {
    "save": ("#56b4e9", ""),
    "redo": ("#d55e00", "////"),
    "detect": ("#f0e442", "...."),
    "restart": ("#0072b2", "\\\\\\\\"),
    "wait": ("#cc79a7", "xxxx"),
    "slow": ("#999999", "----"),
}
ROW_INCH, FRAME_INCH = 0.42, 1.3
WRITTEN_MIN = 0.085  # of the widest bar: narrower parts have no room for a figure
ROOM = 1.42  # of the widest bar, for what is written behind it


def draw(scenario: Scenario, found: Comparison, path: Path) -> None:
    """Mean shares of wall time; behind each bar what is left for work, and what that comes to."""
    fill = partial(_fill, scenario=scenario, found=found)
    figure_style.save(path, fill, FRAME_INCH + ROW_INCH * max(2, len(found.contenders)))


def _fill(figure: Figure, scenario: Scenario, found: Comparison) -> None:
    axis = figure.subplots()
    widest = max((1 - one.shares["work"] for one in found.contenders), default=0.0) or 1.0
    named: set[Cause] = set()
    for row, one in enumerate(found.contenders):
        left = 0.0
        for cause in CAUSES[1:]:
            share = one.shares[cause]
            if not share:
                continue
            colour, hatch = LOOK[cause]
            axis.barh(
                row, share, 0.62, left, color=colour, hatch=hatch, edgecolor="white", lw=0,
                label=cause if cause not in named else None,
            )  # fmt: skip
            named.add(cause)
            if share > WRITTEN_MIN * widest:
                axis.text(
                    left + share / 2, row, said(share, "share"), ha="center", va="center",
                    fontsize=6.5, bbox={"fc": "white", "ec": "none", "pad": 0.8, "alpha": 0.85},
                )  # fmt: skip
            left += share
        axis.text(left + 0.015 * widest, row, _outcome(one), va="center", fontsize=7)
    axis.set_yticks(range(len(found.contenders)), [one.strategy for one in found.contenders])
    axis.tick_params("y", length=0)
    axis.invert_yaxis()
    axis.set_xlim(0, ROOM * widest)
    ticks = MaxNLocator(6).tick_values(0, ROOM * widest)
    axis.set_xticks([one for one in ticks if one <= min(1.0, ROOM * widest)])
    axis.xaxis.set_major_formatter(
        PercentFormatter(1, decimals=0 if widest > 0.05 else 2, symbol=" %")
    )
    axis.set_xlabel("share of wall time, mean")
    axis.set_title(f"{scenario.gpus:,} GPUs, {scenario.failures.name}: what is lost", loc="left")
    figure.legend(loc="outside lower center", ncols=len(LOOK), handlelength=1.6)


def _outcome(one: Contender) -> str:
    return (
        f"{said(one.shares['work'], 'share')} work\n"
        f"{said(one.takes.value, 's')}, {said(one.costs.value, 'USD')}"
    )
