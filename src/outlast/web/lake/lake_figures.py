"""Figures of a lake's pages as SVG: intervals of a table, rates over time, lanes of a node."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from outlast.fleet.analysis.failure_rates import ALL
from outlast.fleet.record_tables import DAY_NS
from outlast.fleet.report.report_sections import ReportSection
from outlast.web.lake.node_history import KINDS, NodeEvent
from outlast.web.page_figures import TimeAxis, curve

# Value and ends of the first 90 % interval of a section, by the value's key.
_INTERVALS = {
    "mttf_h": ("low_h", "high_h"),
    "per_gpu_hour": ("per_gpu_hour_low", "per_gpu_hour_high"),
    "per_1000_node_days": ("per_1000_node_days_low", "per_1000_node_days_high"),
    "ettr": ("low", "high"),
}
LANE_PX = 22
TICKS = 2


def _keys(section: ReportSection) -> tuple[str, str, str] | None:
    known = {column.key for column in section.columns}
    return next(((key, *ends) for key, ends in _INTERVALS.items() if {key, *ends} <= known), None)


def has_intervals(section: ReportSection) -> bool:
    """Return whether the rows of a section have an interval."""
    return _keys(section) is not None


def interval(section: ReportSection, row: Mapping[str, Any]) -> str:
    """Draw a row's value and its interval, on the logarithmic axis of all rows.

    Shares are on an axis from 0 to 1. An end that is not known lies at the axis' end.
    """
    keys = _keys(section)
    assert keys is not None
    key, low, high = keys
    if all(row[name] is None for name in keys):
        return ""
    values = [each[name] for each in section.rows for name in keys]
    positive = [value for value in values if value and math.isfinite(value)]
    is_share = key == "ettr"
    least, most = (min(positive, default=1.0), max(positive, default=1.0))

    def place(value: float | None, default: float) -> float:
        if value is None or not math.isfinite(value):
            return default
        if is_share:
            return 100 * min(1.0, max(0.0, value))
        if value <= 0:
            return 0.0
        return 100 * math.log(value / least) / (math.log(most / least) or 1.0)

    begin, end = place(row[low], 0.0), place(row[high], 100.0)
    dot = "" if row[key] is None else f'<circle cx="{place(row[key], 0.0):.1f}%" cy="50%" r="4"/>'
    return (
        '<svg class="interval" aria-hidden="true">'
        '<line class="zero" x1="0" x2="100%" y1="50%" y2="50%"/>'
        f'<line x1="{begin:.1f}%" x2="{end:.1f}%" y1="50%" y2="50%"/>{dot}</svg>'
    )


def rolling(section: ReportSection) -> str:
    """Draw the rate of all failures over time; "" where there are fewer than two values."""
    points = [
        (day_ns(row["day"]), row["per_1000_node_days"])
        for row in section.series
        if row["cause"] == ALL and row["per_1000_node_days"] is not None
    ]
    if len(points) < 2:
        return ""
    t_ns, rates = zip(*sorted(points), strict=True)
    axis = TimeAxis(t_ns[0], t_ns[-1], ())
    return curve(
        np.array(t_ns, dtype=np.int64),
        np.array(rates, dtype=np.float64),
        axis,
        f"failures since {_date(t_ns[0])}",
        "1000 node-days",
    )


def day_ns(day: dt.date) -> int:
    """Return the begin of a day in Unix nanoseconds."""
    return (day - dt.date(1970, 1, 1)).days * DAY_NS


def lanes(events: Sequence[NodeEvent], since_ns: int, until_ns: int) -> str:
    """Draw the events of a node over the window, a lane for each kind."""
    kinds = [kind for kind in KINDS if any(event.kind == kind for event in events)]
    if not kinds:
        return ""
    height = LANE_PX * len(kinds)
    labels = "".join(
        f'<text x="-6" y="{LANE_PX * (row + 0.5)}" class="label end">{kind}</text>'
        for row, kind in enumerate(kinds)
    )
    shapes = "".join(_shapes(events, kinds, since_ns, until_ns))
    ticks = "".join(
        f'<line class="tick" x1="{at}%" x2="{at}%" y1="0" y2="{height}"/>'
        f'<text class="label {"end" if at == 100 else "middle" if at else ""}" x="{at}%"'
        f' y="{height + 13}">{_date(since_ns + (until_ns - since_ns) * at // 100)}</text>'
        for at in range(0, 101, 100 // TICKS)
    )
    return (
        f'<svg class="figure" role="img" height="{height + 20}"><title>events of this node over'
        f' the window; the table has them</title><svg class="lanes">{ticks}{shapes}{labels}</svg>'
        "</svg>"
    )


def _shapes(
    events: Sequence[NodeEvent], kinds: Sequence[str], since_ns: int, until_ns: int
) -> Iterator[str]:
    span = max(1, until_ns - since_ns)
    drawn: set[tuple[str, int]] = set()
    for event in events:
        end_ns = event.t_ns
        if event.kind == "outage":
            end_ns = until_ns if event.until_ns is None else event.until_ns
        begin, end = (min(1.0, max(0.0, (t_ns - since_ns) / span)) for t_ns in (event.t_ns, end_ns))
        place = (f"{event.kind}{event.level}", round(1000 * begin))
        if place in drawn and event.kind != "outage":  # as many as can be told apart
            continue
        drawn.add(place)
        width = f"{100 * (end - begin):.2f}%" if end - begin > 0.003 else "3"
        y = LANE_PX * kinds.index(event.kind) + 3
        yield (
            f'<rect class="{event.level or event.kind}" x="{100 * begin:.2f}%" y="{y}"'
            f' width="{width}" height="{LANE_PX - 6}"/>'
        )


def _date(t_ns: int) -> str:
    return f"{dt.datetime.fromtimestamp(t_ns / 1e9, tz=dt.UTC):%Y-%m-%d}"
