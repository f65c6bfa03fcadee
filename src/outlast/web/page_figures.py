"""Figures of the page as SVG elements, whose texts keep their size at any width.

Shapes are drawn in a nested view of X by the figure's height, which is stretched; labels and marks
have places in per cent. Colours are classes of the page's style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outlast.telemetry.history.event_columns import Integers
from outlast.telemetry.history.growing_account import DrawnAccount
from outlast.telemetry.history.time_buckets import BUCKETS, Bucket, TimeTotals
from outlast.text_formatting import percentage

X = 1000  # width of the stretched view
LANES_PX = (60, 320)  # height of all lanes, at least and at most
LANE_PX = 16
CURVE_PX = 120
POINTS_MAX = 400
GAP = 8
LARGEST = 1e100  # as good as infinite on a curve; also False for NaN
SMALLEST = 1e-300  # of an axis: a share of a smaller range is 0
TICKS = 5
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)


class IncidentMark(NamedTuple):
    """An incident on the axis of time."""

    number: int
    t_ns: int
    text: str


class TimeAxis(NamedTuple):
    """The axis of time that all figures share.

    `run_ns`: begin and end of a run, of which the axis shows a part; None: it cannot be zoomed.
    """

    begin_ns: int
    end_ns: int
    marks: tuple[IncidentMark, ...]
    run_ns: tuple[int, int] | None = None

    def share(self, t_ns: float) -> float:
        """Return a time's place, from 0 to 1."""
        return (t_ns - self.begin_ns) / max(1, self.end_ns - self.begin_ns)

    def ticks(self) -> list[tuple[float, str]]:
        """Return places and labels: durations since the begin of the figure."""
        wall_s = (self.end_ns - self.begin_ns) / 1e9
        step_s = next(
            (s for s in _STEPS_S if wall_s / s <= TICKS), 86400 * math.ceil(wall_s / 432000)
        )
        if wall_s < 1:
            return [(0.0, "0")]
        return [
            (at * step_s / wall_s, _tick(at * step_s)) for at in range(int(wall_s / step_s) + 1)
        ]


def _tick(seconds: float) -> str:
    """Format a round duration: `0`, `30 s`, `10 min`, `4 h`, `2 d`."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s or seconds == length_s:
            return f"{seconds / length_s:g} {unit}"
    return f"{seconds:g} s" if seconds else "0"


def timeline(times: DrawnAccount, axis: TimeAxis) -> str:
    """Draw the time of every rank; of many ranks, rows of neighbouring ranks."""
    rows = times.columns.spans()
    height = min(LANES_PX[1], max(LANES_PX[0], LANE_PX * len(rows)))
    each = height / max(1, len(rows))
    shapes = []
    for row, spans in enumerate(rows):
        paths: dict[Bucket, list[str]] = {}
        for span in spans:
            begin, end = (round(X * axis.share(t), 1) for t in (span.begin_ns, span.end_ns))
            paths.setdefault(span.bucket, []).append(f"M{begin:g} {row * each:g}h{end - begin:g}")
        shapes += [
            f'<path class="lane {bucket}" d="{_closed(parts, each - min(2, each // 4))}"/>'
            for bucket, parts in paths.items()
        ]
    labels = [
        f'<text x="-6" y="{(row + 0.5) * each:.1f}" class="label end">{row * times.group}</text>'
        for row in _labelled(len(rows))
    ]
    name = "use of time of each rank over time; the table below has the sums"
    return _figure(axis, height, name, stretched("".join(shapes), height) + "".join(labels))


def _closed(parts: Iterable[str], height: float) -> str:
    """Close bars that are given by their upper edges."""
    return "".join(f"{part}v{height:.3g}h{-float(part.rpartition('h')[2]):g}z" for part in parts)


def _labelled(rows: int) -> Iterable[int]:
    """Return the rows that have a label."""
    return range(rows) if rows <= LANES_PX[1] // LANE_PX else (0, rows // 2, rows - 1)


def curve(t_ns: Integers, value: NDArray[np.float64], axis: TimeAxis, name: str, unit: str) -> str:
    """Draw values over time, with the extremes of each column where there are more than fit."""
    is_finite = np.abs(value) < LARGEST
    shown = thinned(t_ns[is_finite], value[is_finite], axis)
    if len(shown) < 2:
        return ""
    values = sorted(value for _, value in shown)
    low, high = values[0], values[-1]
    cut = values[int(0.98 * (len(values) - 1))]
    if high > 4 * cut > 0 and low >= 0:  # a step of a recovery would flatten all others
        high = 1.5 * cut
    room = (high - low) or abs(high)
    room = room if room > SMALLEST else 1.0
    low, high = low - 0.06 * room, high + 0.06 * room
    line = "".join(
        '<polyline class="curve" points="'
        + " ".join(
            f"{X * axis.share(t_ns):.1f}"
            f",{CURVE_PX * (1 - (min(value, high) - low) / (high - low)):.1f}"
            for t_ns, value in part
        )
        + '"/>'
        for part in _connected(shown)
    )
    labels = "".join(
        f'<text x="-6" y="{y}" class="label end">{value:.3g}</text>'
        for y, value in ((8, high), (CURVE_PX - 4, low))
    )
    title = f"{name} in {unit} over time, from {values[0]:.4g} to {values[-1]:.4g}"
    return _figure(axis, CURVE_PX, title, stretched(line, CURVE_PX) + labels)


def _connected(points: list[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """Divide a curve where nothing was reported for GAP times the median distance."""
    distances = sorted(after[0] - before[0] for before, after in pairwise(points))
    gap_ns = GAP * max(1, distances[len(distances) // 2])
    parts = [[points[0]]]
    for before, after in pairwise(points):
        if after[0] - before[0] > gap_ns:
            parts.append([])
        parts[-1].append(after)
    return parts


def thinned(t_ns: Integers, value: NDArray[np.float64], axis: TimeAxis) -> list[tuple[int, float]]:
    """Return points, by time, that are few enough to draw."""
    chosen = np.arange(len(t_ns))
    if len(t_ns) > POINTS_MAX:
        share = (t_ns - axis.begin_ns) / max(1, axis.end_ns - axis.begin_ns)
        column = (share * POINTS_MAX / 2).astype(np.int64)
        begins = np.flatnonzero(np.diff(column, prepend=column[0] - 1))
        parts = zip(begins.tolist(), [*begins[1:].tolist(), len(column)], strict=True)
        extremes = (
            (begin + value[begin:end].argmin(), begin + value[begin:end].argmax())
            for begin, end in parts
        )
        chosen = np.unique(np.array(list(extremes)).reshape(-1))
    return list(zip(t_ns[chosen].tolist(), value[chosen].tolist(), strict=True))


class WaterfallRow(NamedTuple):
    """One row of the waterfall, in shares of the capacity (wall time of all ranks)."""

    name: str
    begin: float
    width: float
    seconds: float  # of one rank, on average
    what: str
    look: str  # class of its colour


_MEANINGS: dict[Bucket, str] = {
    "start": "until a rank's first phase",
    "step": "optimizer steps that count",
    "eval": "phases without an optimizer",
    "checkpoint": "phases that write a checkpoint",
    "script": "the script's own code between phases",
    "lost": "discarded attempts and steps that were rolled back",
    "recovery": "from a generation's end to the next one's beginning",
    "absent": "without a worker, while the others went on",
    "stop": "after a rank's last phase",
    "down": "between two launchers",
}


def waterfall(times: TimeTotals) -> list[WaterfallRow]:
    """Divide the capacity, from all of it down to the steps, each loss with its name; sums are
    exact."""
    ranks = max(1, times.seats)
    lost: list[Bucket] = [b for b in BUCKETS if b != "step" and times.totals_ns[b]]
    lost.sort(key=lambda bucket: times.totals_ns[bucket], reverse=True)
    rows: list[WaterfallRow] = []
    at = 1.0
    for bucket in lost:
        width = times.totals_ns[bucket] / max(1, times.capacity_ns)
        at -= width
        seconds = times.totals_ns[bucket] / ranks / 1e9
        rows.append(WaterfallRow(bucket, at, width, seconds, _MEANINGS[bucket], bucket))
    share = times.goodput
    seconds = times.totals_ns["step"] / ranks / 1e9
    return [*rows, WaterfallRow("step", 0.0, share, seconds, _MEANINGS["step"], "step")]


def bar(row: WaterfallRow) -> str:
    """Draw one row of the waterfall."""
    return (
        '<svg class="bar" role="img">'
        f"<title>{row.name}: {percentage(row.width)}</title>"
        f'<rect class="lane {row.look}" x="{100 * row.begin:.3f}%" width="{100 * row.width:.3f}%"'
        ' height="100%"/></svg>'
    )


def stretched(shapes: str, height: float) -> str:
    return (
        f'<svg class="shapes" viewBox="0 0 {X} {height:g}" preserveAspectRatio="none" width="100%"'
        f' height="{height:g}">{shapes}</svg>'
    )


def _figure(axis: TimeAxis, height: float, name: str, inside: str) -> str:
    """Return a figure with its ticks below and its incidents above. `name`: of it, as text.

    The page's script moves what has a place of its own (`at`), and the view of the shapes.
    """
    ticks = "".join(
        f'<svg class="at" x="{100 * at:.2f}%"><line class="tick" y2="{height:g}"/>'
        f'<text y="{height + 13:g}" class="label'
        f'{" end" if at > 0.95 else " middle" if at else ""}">{text}</text></svg>'
        for at, text in axis.ticks()
    )
    begin_ns, end_ns = axis.run_ns or (axis.begin_ns, axis.end_ns)
    marks = "".join(
        f'<svg class="at" x="{100 * axis.share(mark.t_ns):.2f}%"'
        f' data-at="{(mark.t_ns - begin_ns) / 1e9:.3f}"><a href="#incident-{mark.number}"'
        f' aria-label="incident {mark.number}"><line class="hit" y1="-16" y2="{height:g}"/>'
        f'<line class="mark" y1="-3" y2="{height:g}"/><text class="number" y="-5">{mark.number}'
        f"<title>{escape(mark.text)}</title></text></a></svg>"
        for mark in axis.marks
    )
    from_s, to_s, wall_s = (
        (t_ns - begin_ns) / 1e9 for t_ns in (axis.begin_ns, axis.end_ns, end_ns)
    )
    zoomed = f' data-from="{from_s:.6f}" data-to="{to_s:.6f}" data-wall="{wall_s:.6f}"'
    return (
        f'<svg class="figure" role="group" aria-label="{escape(name)}" height="{height + 34:g}"'
        f"{zoomed if axis.run_ns else ''}>"
        f'<svg class="plot" y="16"><g class="ticks" data-height="{height:g}">{ticks}</g>'
        f"{inside}{marks}</svg></svg>"
    )
