"""Pages of a lake as HTML: the report in parts, its form, and the page of a node."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outlast import __version__
from outlast.fleet.analysis.exposure import LARGE_GPUS
from outlast.fleet.lake import format_time
from outlast.fleet.report.fleet_report import (
    ROWS_SHOWN,
    FleetReport,
    describe_extent,
    format_cell,
)
from outlast.fleet.report.report_sections import Headline, ReportColumn, ReportSection, Unit
from outlast.web.lake import lake_figures
from outlast.web.lake.lake_query import LakeQuery
from outlast.web.lake.lake_reading import LakeChoices
from outlast.web.lake.node_history import EVENTS_MAX, TEXT_MAX, NodeHistory
from outlast.web.page_templates import asset, content_policy, environment

_MARKER = "<!--report-->"
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
TITLES = {
    "mttf": "MTTF",
    "causes": "causes",
    "rolling": "rate over time",
    "states": "final states",
    "repairs": "outages and parts",
    "lemons": "bad nodes",
    "ettr": "ETTR",
    "goodput": "costs",
}


def render_lake(
    path: Path, texts: Mapping[str, str], query: LakeQuery, choices: LakeChoices
) -> tuple[str, str]:
    """Return the page up to its report, and what follows. `texts`: what its address gives."""
    template = environment().get_template("lake/lake_page.html.j2", globals=_globals())
    page = template.render(
        path=str(path),
        texts=texts,
        encoded=query.encoded(),
        choices=choices,
        titles=TITLES,
        large_gpus=LARGE_GPUS,
        marker=_MARKER,
        policy=content_policy(),
        version=__version__,
    )
    before, _, after = page.partition(_MARKER)
    return before, after


def render_first(headlines: Sequence[Headline]) -> str:
    """Return the headline figures that need no section."""
    return _part("first", headlines)


def render_section(section: ReportSection, link: Callable[[str], str]) -> str:
    """Return a section of the report. `link`: address of a node's page, "" without one."""
    return _part("section", section, link)


def render_rest(report: FleetReport, headlines: Sequence[Headline], command: str) -> str:
    """Return the other headline figures, and the notes."""
    return _part("rest", report, headlines, command)


def render_refusal(text: str) -> str:
    """Return why there is no report."""
    return _part("refusal", text)


def render_node(
    path: Path,
    name: str,
    query: LakeQuery,
    history: NodeHistory | None,
    window_ns: tuple[int, int],
    refusal: str = "",
) -> str:
    """Return the page of a node. `refusal`: why there is no history."""
    template = environment().get_template("lake/node_page.html.j2", globals=_globals())
    return template.render(
        path=str(path),
        name=_clipped(name),
        encoded=query.encoded(),
        body=render_history(history, window_ns) if history else "",
        refusal=refusal,
        policy=content_policy(),
        version=__version__,
    )


def render_history(history: NodeHistory, window_ns: tuple[int, int], key: str = "") -> str:
    """Return the history of a node. `key`: begin of its anchors in a document of several."""
    window = f"{format_time(window_ns[0])} to {format_time(window_ns[1])}"
    lanes = lake_figures.lanes(history.events, *window_ns)
    return _part("history", history, window, lanes, EVENTS_MAX, key)


def _part(name: str, *arguments: object) -> str:
    template = environment().get_template("lake/lake_parts.html.j2", globals=_globals())
    return str(getattr(template.module, name)(*arguments))


def _globals() -> dict[str, Callable[..., Any] | int]:
    return {
        "asset": asset,
        "cell": _cell,
        "clipped": _clipped,
        "extent": describe_extent,
        "format_cell": format_cell,
        "has_intervals": lake_figures.has_intervals,
        "input_type": lambda text: "date" if not text or _DATE.fullmatch(text) else "text",
        "interval": lake_figures.interval,
        "known_time": lambda t_ns: "unknown" if t_ns is None else format_time(t_ns),
        "rolling": lake_figures.rolling,
        "rows_shown": ROWS_SHOWN,
        "time": format_time,
    }


def _cell(value: object, unit: Unit) -> str:
    return format_cell(value, ReportColumn("", "", unit))


def _clipped(text: str) -> str:
    """Return a text of a log, cut with its length where it is long."""
    if len(text) <= TEXT_MAX:
        return text
    return f"{text[:TEXT_MAX]}... ({len(text):,} characters)"
