"""Figures of `outlast plan`, in one style. They need matplotlib.

This module defines their common style, in addition to `outlast.figure_style`.
"""

from __future__ import annotations

from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter

from outlast.controller.save_schedule.save_intervals import span
from outlast.plan.model.ladder_costs import Strategy

# Okabe and Ito's colours, which differ by line and marker as well.
STRATEGY_LOOK: dict[Strategy, tuple[str, str, str]] = {
    "checkpoint-restart": ("#d55e00", "-", "o"),
    "peer-memory": ("#e69f00", "--", "s"),
    "migrate": ("#0072b2", "-.", "^"),
    "drop": ("#999999", ":", "v"),
    "outlast": ("#009e73", "-", "D"),
}
_TICKS_S = (
    *(0.01, 0.1, 1, 2, 5, 10, 30),
    *(60 * count for count in (1, 2, 5, 10, 30)),
    *(3600 * count for count in (1, 3, 12)),
    *(86400 * count for count in (1, 3, 10, 30, 100, 365)),
)


def label_spans(axis: Axis, low_s: float, high_s: float) -> None:
    """Set round ticks on a logarithmic axis in seconds."""
    axis.set_ticks([tick for tick in _TICKS_S if low_s <= tick <= high_s])
    axis.set_ticks([], minor=True)
    axis.set_major_formatter(FuncFormatter(lambda value, _: span(value)))
