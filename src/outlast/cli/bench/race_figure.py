"""Figure of `outlast bench`: time to finish by strategy, beside its prediction.

Needs matplotlib (extra `figures`); nothing else imports this module at load.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from outlast.cli.bench.strategy_runs import StrategyResult
from outlast.figure_style import save

ROW_INCH = 0.34
_BLUE, _GREY, _BLACK = "#0072b2", "#aaaaaa", "#333333"


def draw_race(path: Path, results: Sequence[StrategyResult]) -> None:
    """Draw the time of each strategy, and the band of its prediction. Raises StorageError."""
    save(path, lambda figure: _fill(figure, results), 0.9 + ROW_INCH * len(results))


def _fill(figure: Figure, results: Sequence[StrategyResult]) -> None:
    axes = figure.subplots()
    places = range(len(results))
    finished = [one.finish_s or 0.0 for one in results]
    colours = [_GREY if one.predicted is None else _BLUE for one in results]
    axes.barh(places, finished, height=0.6, color=colours)
    if finished and finished[0]:
        axes.axvline(finished[0], color=_GREY, linewidth=0.8, linestyle=":")
    for place, one in zip(places, results, strict=True):
        if one.predicted is not None:
            predicted = one.predicted
            axes.errorbar(
                predicted.finish_s,
                place,
                xerr=[
                    [max(0.0, predicted.finish_s - predicted.low_s)],
                    [max(0.0, predicted.high_s - predicted.finish_s)],
                ],
                fmt="o",
                color=_BLACK,
                markersize=3,
                linewidth=0.9,
                capsize=2.5,
            )
        if one.finish_s is None:
            axes.text(0.0, place, f" {one.outcome}", va="center")
    axes.set_yticks(list(places), [one.strategy for one in results])
    axes.invert_yaxis()
    axes.set_xlabel("time to finish, s; dots and bars: predicted for this schedule of kills")
