"""The page of a run as HTML: whole, and in parts that a live page replaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outlast import __version__
from outlast.telemetry.history.time_buckets import BUCKETS
from outlast.telemetry.run_board import headline
from outlast.text_formatting import duration, percentage, size, warning
from outlast.web import page_figures
from outlast.web.page_figures import IncidentMark, TimeAxis
from outlast.web.page_templates import asset, content_policy, environment
from outlast.web.run_content import RunContent, RunOverview

PARTS = (
    "answers",
    "timeline",
    "waterfall",
    "curves",
    "incidents",
    "checkpoints",
    "workers",
    "findings",
)


ZOOMED = ("timeline", "curves")  # parts whose axis of time can be zoomed


def axis_of(content: RunContent) -> TimeAxis:
    """Return the axis of time of a run's figures, with its incidents."""
    times = content.times.totals
    marks = [
        IncidentMark(incident.number, incident.t_ns, headline(incident, brief=True))
        for incident, _ in content.stories
        if times.begin_ns <= incident.t_ns <= times.end_ns
    ]
    run_ns = (content.totals.begin_ns, content.totals.end_ns)
    return TimeAxis(times.begin_ns, times.end_ns, tuple(marks), run_ns)


def render_parts(
    content: RunContent, logs: str = "", names: Sequence[str] = PARTS
) -> dict[str, str]:
    """Return parts of the page by name. `logs`: where the server has the logs of ranks."""
    template = environment().get_template("run_parts.html.j2", globals=_globals())
    module = template.make_module({"logs": logs})
    return {part: str(getattr(module, part)(content)) for part in names}


def status(content: RunContent) -> str:
    """Return what the head of the page says of its age."""
    read = f"{content.events:,} events"
    return f"live, {read}" if content.life == "running" else read


def render_page(
    content: RunContent,
    name: str,
    *,
    stream: str = "",
    index: str = "",
    logs: str = "",
    plan: str = "",
    where: str = "",
) -> str:
    """Return the page. `stream`: where the server sends changes; "": the page stays as it is.

    `index`, `logs`, `plan`: where the server has them; `where`: parts on request; "": nowhere.
    """
    return (
        environment()
        .get_template("run_page.html.j2")
        .render(
            parts=render_parts(content, logs),
            name=name,
            script=content.summary.script,
            status=status(content),
            stream=stream,
            index=index,
            plan=plan,
            where=where,
            style=asset("page.css"),
            scripts=tuple(map(asset, ("local_times.js", "live_parts.js", "page.js"))),
            policy=content_policy(),
            version=__version__,
        )
    )


def render_index(overviews: Mapping[str, RunOverview | str], path: str) -> str:
    """Return the index of runs. A text in place of an overview: why there is none."""
    return (
        environment()
        .get_template("runs_index.html.j2", globals=_globals())
        .render(overviews=overviews, path=path, style=asset("page.css"), policy=content_policy())
    )


def _globals() -> dict[str, Callable[..., Any]]:
    return {
        "ago": lambda t_ns, content: f"{duration(max(0, content.now_ns - t_ns) / 1e9)} ago",
        "bar": page_figures.bar,
        "buckets": lambda content: [b for b in BUCKETS if content.totals.totals_ns[b]],
        "draw_curves": _curves,
        "draw_timeline": lambda content: page_figures.timeline(content.times, axis_of(content)),
        "draw_waterfall": lambda content: page_figures.waterfall(content.totals),
        "duration": duration,
        "headline": headline,
        "percentage": percentage,
        "size": size,
        "warning": warning,
    }


def _curves(content: RunContent) -> tuple[str, str]:
    axis, loss, steps = axis_of(content), content.loss, content.steps
    return (
        page_figures.curve(loss.t_ns, loss.loss, axis, "loss", "its own unit"),
        page_figures.curve(steps.ends_ns, steps.lasted_s, axis, "step time", "seconds"),
    )
