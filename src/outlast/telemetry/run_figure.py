"""Report figure: losses of the runs, and the time of every rank below them.

Needs matplotlib (extra `figures`); nothing else imports this module at load.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from outlast.errors import UsageError
from outlast.events import AnyEvent, WorkerSeated
from outlast.figure_style import RC
from outlast.telemetry.history.incident_course import Incident
from outlast.telemetry.history.phase_blocks import incidents
from outlast.telemetry.history.run_history import read_history
from outlast.telemetry.history.time_buckets import BUCKETS, Bucket, TimeAccount
from outlast.telemetry.lane_columns import COLOUR, columns
from outlast.telemetry.time_accounting import account
from outlast.text_formatting import duration, fault_text, percentage, plural, rank_and_host

WIDTH_INCH = 7.2
LOSS_INCH = 2.3
LANE_INCH = 0.2
LANES_MIN_INCH = 0.6
ROOM_INCH = 0.42  # a panel's title and axis
LEGEND_INCH = 0.25
KEY_LINE_INCH = 0.14
KEY_LINES_MAX = 16
TEXT_MAX = 80
_LINES = (("#9ecae1", 5.0), ("#08306b", 1.0), ("#d55e00", 0.8), ("#009e73", 0.8))
_DIAMOND: Any = {
    "marker": "D",
    "color": "white",
    "markeredgecolor": "black",
    "markeredgewidth": 0.7,
    "markersize": 3.5,
}


class _Run(NamedTuple):
    label: str
    times: TimeAccount
    incidents: list[Incident]
    losses: dict[tuple[int, int], float]  # (seat, step) -> last reported loss
    seated_ns: list[tuple[int, int]]  # (seat, time) of each replacement

    def mean_losses(self) -> tuple[list[int], list[float]]:
        by_step: dict[int, list[float]] = {}
        for (_, step), loss in sorted(self.losses.items()):
            by_step.setdefault(step, []).append(loss)
        steps = sorted(by_step)
        return steps, [sum(by_step[step]) / len(by_step[step]) for step in steps]

    def seconds(self, t_ns: int) -> float:
        return (t_ns - self.times.begin_ns) / 1e9


def report(runs: Sequence[tuple[Path, str]], path: Path) -> None:
    """Draw `runs` (directory and label; the undisturbed one first) into `path` (.svg, .pdf, .png).

    Raises RunDirError when a directory holds no run, OSError when `path` cannot be written.
    """
    if not runs:
        raise UsageError("a report needs at least one run; nothing was drawn")
    read = [_read(run_dir, label) for run_dir, label in runs]
    with mpl.rc_context(RC):
        figure = _figure(read)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata, dpi=200)


def _read(run_dir: Path, label: str) -> _Run:
    history = read_history(run_dir, lambda _damage: None)
    reported = history.metrics
    rows = zip(*(column[reported.has_loss].tolist() for column in reported), strict=True)
    losses = {(seat, step): loss for _, _, seat, step, loss, _ in rows}
    return _Run(label, account(history), incidents(history), losses, _took_over(history.events))


def _took_over(events: Sequence[AnyEvent]) -> list[tuple[int, int]]:
    """Return the replacements of each seat's worker, with times; not its first worker."""
    sitting: dict[int, str] = {}
    changes: list[tuple[int, int]] = []
    for event in events:
        if isinstance(event, WorkerSeated):
            if sitting.get(event.seat, event.worker) != event.worker:
                changes.append((event.seat, event.t_ns))
            sitting[event.seat] = event.worker
    return changes


def _figure(runs: list[_Run]) -> Figure:
    lanes = [max(LANES_MIN_INCH, LANE_INCH * len(run.times.lanes) + 0.25) for run in runs]
    key = _key(runs)
    heights = [LOSS_INCH, *lanes, LEGEND_INCH + KEY_LINE_INCH * len(key)]
    height_inch = sum(heights) + ROOM_INCH * (len(heights) - 1)
    figure = Figure(figsize=(WIDTH_INCH, height_inch), layout="constrained")
    axes: list[Axes] = list(figure.subplots(len(heights), 1, height_ratios=heights))
    _losses(axes[0], runs)
    wall_s = max(run.times.wall_ns for run in runs) / 1e9
    for run, axis in zip(runs, axes[1:-1], strict=True):
        _timeline(axis, run, wall_s)
    axes[-2].set_xlabel("wall time (s)")
    for axis in axes[1:-2]:
        axis.set_xticklabels([])
    _legend(axes[-1], runs, key)
    return figure


def _losses(axis: Axes, runs: list[_Run]) -> None:
    for index, run in enumerate(runs):
        colour, width = _LINES[min(index, len(_LINES) - 1)]
        steps, losses = run.mean_losses()
        axis.plot(
            steps, losses, color=colour, linewidth=width, label=run.label, solid_capstyle="round"
        )
    axis.set_xlabel("committed step")
    axis.set_ylabel("loss (mean over ranks)")
    axis.margins(x=0.01)
    axis.grid(color="#e6e6e6", linewidth=0.5)
    axis.set_axisbelow(True)
    if any(run.losses for run in runs):
        axis.legend(loc="upper right", frameon=False)
    note = _difference(runs)
    if note:
        axis.set_title(note, loc="left", fontsize=8)


def _difference(runs: list[_Run]) -> str:
    """Describe the largest difference between the first run and the others."""
    if len(runs) < 2:
        return ""
    first = runs[0].losses
    worst, common, missing = 0.0, 0, 0
    for run in runs[1:]:
        shared = first.keys() & run.losses.keys()
        common += len(shared)
        missing += len(first.keys() ^ run.losses.keys())
        worst = max([worst, *(abs(first[at] - run.losses[at]) for at in shared)])
    text = f"largest difference of any rank's loss: {worst:g}"
    text += f" ({'equal to the last bit, ' if not worst else ''}{plural(common, 'value')})"
    return text + (f"; {missing} only in one run" if missing else "")


def _timeline(axis: Axes, run: _Run, wall_s: float) -> None:
    seats = len(run.times.lanes)
    for lane in run.times.lanes:
        by_bucket: dict[Bucket, list[tuple[float, float]]] = {}
        for span in columns(lane.claims, run.times.begin_ns, round(wall_s * 1e9)):
            begin_s = run.seconds(span.begin_ns)
            width_s = (span.end_ns - span.begin_ns) / 1e9
            by_bucket.setdefault(span.bucket, []).append((begin_s, width_s))
        for bucket, bars in by_bucket.items():
            axis.broken_barh(bars, (lane.seat - 0.4, 0.8), color=COLOUR[bucket], linewidth=0)
    changed = [(run.seconds(t_ns), seat) for seat, t_ns in run.seated_ns]
    if changed:
        axis.plot(*zip(*changed, strict=True), linestyle="", clip_on=False, **_DIAMOND)
    _numbers(axis, run, wall_s)
    axis.set_xlim(0, wall_s)
    axis.set_ylim(seats - 0.4, -0.6)
    axis.set_yticks(range(seats) if seats <= 16 else [0, seats - 1])
    axis.set_ylabel("rank")
    axis.spines["left"].set_visible(False)
    axis.tick_params(left=False)
    subtitle = f"{duration(run.times.wall_ns / 1e9)}, ETTR {percentage(run.times.ettr)}"
    room = 18 if run.incidents else 4
    axis.set_title(f"{run.label}: {subtitle}", loc="left", fontsize=8, pad=room)


def _numbers(axis: Axes, run: _Run, wall_s: float) -> None:
    """Draw incident numbers above the lanes, moved apart where they would touch."""
    broken_s = [run.seconds(incident.t_ns) for incident in run.incidents]
    for incident, broke_s, at_s in zip(
        run.incidents, broken_s, apart(broken_s, 0.03 * wall_s, wall_s), strict=True
    ):
        axis.annotate(
            str(incident.number),
            xy=(broke_s, -0.45),
            xycoords="data",
            xytext=(at_s, 1.0),
            textcoords=axis.get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontsize=7,
            annotation_clip=False,
            bbox={"boxstyle": "circle,pad=0.22", "fc": "white", "ec": "black", "lw": 0.7},
            arrowprops={"arrowstyle": "-", "lw": 0.7, "shrinkA": 0, "shrinkB": 0},
        )


def apart(wanted: Sequence[float], gap: float, end: float) -> list[float]:
    """Return places in 0 to `end`, near the `wanted` ones (sorted), at least a `gap` apart.

    Where they do not all fit, the gap shrinks.
    """
    gap = min(gap, end / max(1, len(wanted)))
    spread: list[float] = []
    for place in wanted:
        spread.append(max(place, spread[-1] + gap) if spread else place)
    limit = end
    for index in reversed(range(len(spread))):
        spread[index] = min(spread[index], limit)
        limit = spread[index] - gap
    return spread


def _key(runs: list[_Run]) -> list[str]:
    """Describe the incidents by their numbers in the figure."""
    lines = []
    several = sum(bool(run.incidents) for run in runs) > 1
    for run in runs:
        if several and run.incidents:
            lines.append(f"{run.label}:")
        for incident in run.incidents:
            text = f"{rank_and_host(incident.cause)} {fault_text(incident.cause)}"
            text = text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 3] + "..."
            answer = f", {incident.rung}" if incident.rung else ""
            end = (
                f"{duration(incident.total_ms / 1e3)}"
                if incident.state == "recovered"
                else incident.state
            )
            lost = plural(incident.committed_steps_lost, "step")
            lines.append(
                f"{incident.number}   {text} at step {incident.step}{answer}: {lost} lost, {end}"
            )
    if len(lines) > KEY_LINES_MAX:
        more = plural(len(lines) - KEY_LINES_MAX, "more incident")
        lines = [*lines[:KEY_LINES_MAX], f"... and {more}"]
    return lines


def _legend(axis: Axes, runs: list[_Run], key: list[str]) -> None:
    """Draw the colours and the key of numbers; in points, whatever the figure's size."""
    axis.set_axis_off()
    used = {span.bucket for run in runs for lane in run.times.lanes for span in lane.spans}
    handles: list[Artist] = [
        Patch(color=COLOUR[name], label=name) for name in BUCKETS if name in used
    ]
    if any(run.seated_ns for run in runs):
        handles.append(Line2D([], [], linestyle="", label="worker replaced", **_DIAMOND))
    axis.legend(
        handles=handles,
        loc="upper left",
        ncols=len(handles),
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.0,
        columnspacing=1.0,
        handletextpad=0.5,
        fontsize=7,
    )
    axis.annotate(
        "\n".join(key),
        xy=(0, 1),
        xycoords="axes fraction",
        xytext=(0, -18),
        textcoords="offset points",
        va="top",
        fontsize=7,
        linespacing=1.4,
    )
