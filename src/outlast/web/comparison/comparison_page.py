"""The page of two runs side by side: answers, waterfalls, curves on common axes, settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outlast import __version__
from outlast.telemetry.history.event_columns import Integers
from outlast.text_formatting import duration, percentage
from outlast.web import page_figures
from outlast.web.comparison.run_settings import Difference, RunSettings, differences
from outlast.web.page_figures import LARGEST, TimeAxis, WaterfallRow, X, stretched, thinned
from outlast.web.page_templates import asset, content_policy, environment
from outlast.web.run_answers import PageAnswer
from outlast.web.run_content import RunContent

HEIGHT = 160
PARTS = ("answers", "waterfall", "curves")
TEXT_MAX = 300  # characters of a setting
_TICKS = 4


class ComparedRun(NamedTuple):
    """One of two runs. `content`: a text says why there is none."""

    name: str
    content: RunContent | str
    settings: RunSettings


class WaterfallPair(NamedTuple):
    """Time of two runs in one bucket; None where a run has none of it."""

    name: str
    meaning: str
    rows: tuple[WaterfallRow | None, ...]


class RunCurve(NamedTuple):
    """Values of one run by its committed steps."""

    step: Integers
    value: NDArray[np.float64]


def render_comparison(
    path: Path, runs: Sequence[ComparedRun], refusal: str = "", *, stream: str = ""
) -> str:
    """Return the page of two runs.

    `refusal`: why there is no comparison; `stream`: where the server sends changes, "": nowhere.
    """
    template = environment().get_template("comparison/comparison.html.j2")
    return template.render(
        path=str(path),
        runs=runs,
        refusal=refusal,
        parts={} if refusal else render_comparison_parts(runs),
        status=comparison_status(runs),
        stream=stream,
        tables={
            "Settings": _differences([run.settings.settings for run in runs]),
            "Versions": _differences([run.settings.versions for run in runs]),
        },
        clipped=_clipped,
        asset=asset,
        policy=content_policy(),
        version=__version__,
    )


def render_comparison_parts(runs: Sequence[ComparedRun]) -> dict[str, str]:
    """Return the parts of the page that change while a run goes on, by name."""
    contents = [None if isinstance(run.content, str) else run.content for run in runs]
    template = environment().get_template("comparison/comparison_parts.html.j2")
    module = template.make_module(
        {
            "runs": list(zip(runs, contents, strict=True)),
            "questions": _questions(contents),
            "buckets": _waterfall(contents),
            "loss": draw_common([of and RunCurve(of.loss.step, of.loss.loss) for of in contents]),
            "step_time": draw_common(
                [of and RunCurve(of.steps.step, of.steps.lasted_s) for of in contents]
            ),
            "clipped": _clipped,
            "bar": page_figures.bar,
            "duration": duration,
            "percentage": percentage,
        }
    )
    return {part: str(getattr(module, part)()) for part in PARTS}


def comparison_status(runs: Sequence[ComparedRun]) -> str:
    """Return which runs go on; "" where none does."""
    names = [
        run.name
        for run in runs
        if not isinstance(run.content, str) and run.content.life == "running"
    ]
    return f"live: {' and '.join(map(_clipped, names))}" if names else ""


def have_ended(runs: Sequence[ComparedRun]) -> bool:
    """Return whether both runs have ended: their page does not change any more."""
    return all(
        not isinstance(run.content, str) and run.content.summary.exit_code is not None
        for run in runs
    )


def _differences(known: Sequence[Mapping[str, str]]) -> list[Difference] | None:
    """Return what differs; None where one of the runs is unknown."""
    return differences(*known) if known and all(known) else None


def _questions(
    contents: Sequence[RunContent | None],
) -> list[tuple[str, tuple[PageAnswer | None, ...]]]:
    """Return each question of the first screen with the answer of each run."""
    answers = [{one.key: one for one in of.answers} if of else {} for of in contents]
    found = {key: one.question for each in answers for key, one in each.items()}
    return [(question, tuple(each.get(key) for each in answers)) for key, question in found.items()]


def _waterfall(contents: Sequence[RunContent | None]) -> list[WaterfallPair]:
    """Return the buckets of both runs, in the order of the first that has them."""
    each = [
        {row.name: row for row in page_figures.waterfall(of.times.totals)} if of else {}
        for of in contents
    ]
    known = {name: row.what for rows in each for name, row in rows.items() if name != "step"}
    known |= {name: row.what for rows in each for name, row in rows.items() if name == "step"}
    return [
        WaterfallPair(name, what, tuple(rows.get(name) for rows in each))
        for name, what in known.items()
    ]


def draw_common(curves: Sequence[RunCurve | None]) -> str:
    """Draw curves of runs over their steps, on common axes; "" without two finite values.

    Of a curve with many steps the extremes of each column are drawn.
    """
    finite = [
        RunCurve(of.step[np.abs(of.value) < LARGEST], of.value[np.abs(of.value) < LARGEST])
        if of is not None
        else RunCurve(np.array([], dtype=np.int64), np.array([], dtype=np.float64))
        for of in curves
    ]
    values = np.sort(np.concatenate([of.value for of in finite])) if finite else np.array([])
    if len(values) < 2:
        return ""
    low, high = float(values[0]), float(values[-1])
    cut = float(values[int(0.98 * (len(values) - 1))])
    if high > 4 * cut > 0 and low >= 0:  # a step of a recovery would flatten all others
        high = 1.5 * cut
    room = (high - low) or abs(high)
    room = room if room > page_figures.SMALLEST else 1.0
    low, high = low - 0.06 * room, high + 0.06 * room
    steps = np.concatenate([of.step for of in finite])
    axis = TimeAxis(int(steps.min()), max(int(steps.max()), int(steps.min()) + 1), ())
    lines = "".join(
        f'<polyline class="curve run-{number}" points="'
        + " ".join(
            f"{X * axis.share(step):.1f}"
            f",{HEIGHT * (1 - (min(value, high) - low) / (high - low)):.1f}"
            for step, value in thinned(of.step, of.value, axis)
        )
        + '"/>'
        for number, of in enumerate(finite, 1)
        if len(of.step)
    )
    return (
        f'<svg class="figure" role="img" height="{HEIGHT + 34}"><title>from {values[0]:.4g} to'
        f" {values[-1]:.4g}, over steps {axis.begin_ns:,} to {axis.end_ns:,}</title>"
        f'<svg class="plot" y="16">{_ticks(axis)}{stretched(lines, HEIGHT)}'
        f'<text x="-6" y="8" class="label end">{high:.3g}</text>'
        f'<text x="-6" y="{HEIGHT - 4}" class="label end">{low:.3g}</text></svg></svg>'
    )


def _ticks(axis: TimeAxis) -> str:
    span = axis.end_ns - axis.begin_ns
    places = sorted({axis.begin_ns + span * at // _TICKS for at in range(_TICKS + 1)})
    return "".join(
        f'<line class="tick" x1="{at:.2f}%" x2="{at:.2f}%" y1="0" y2="{HEIGHT}"/>'
        f'<text x="{at:.2f}%" y="{HEIGHT + 13}" class="label'
        f'{" end" if at > 95 else " middle" if at else ""}">{step:,}</text>'
        for step in places
        for at in [100 * axis.share(step)]
    )


def _clipped(text: str | None) -> str:
    """Return a text, cut with its length where it is long."""
    if text is None or len(text) <= TEXT_MAX:
        return text or ""
    return f"{text[:TEXT_MAX]}... ({len(text):,} characters)"
