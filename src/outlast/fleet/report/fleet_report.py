"""The fleet report: every analysis of a lake's window, and its HTML page."""

from __future__ import annotations

import datetime as dt
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import polars as pl
from jinja2 import Environment, PackageLoader, StrictUndefined

from outlast import __version__
from outlast.fleet.analysis import exposure
from outlast.fleet.analysis.exposure import LARGE_GPUS
from outlast.fleet.analysis.lemons import clip_tables
from outlast.fleet.lake import LakeSource, format_time
from outlast.fleet.record_tables import DAY_NS, Tables
from outlast.fleet.report import cost_and_lemon_sections, failure_sections
from outlast.fleet.report.bandwidth_sections import BANDWIDTH_KEYS, bandwidth_sections
from outlast.fleet.report.report_sections import (
    DrawnSection,
    Headline,
    ReportColumn,
    ReportFacts,
    ReportSection,
    headlines,
)
from outlast.text_formatting import plural

ROWS_SHOWN = 15  # of a table; the others are collapsed
SHORT_DAYS = 7
UNCOVERED_SHARE = 0.1  # of a window at either end without a finding, from which on it is noted
UNCOVERED_GAPS = 5  # and as many mean gaps between findings
ORDER = (
    "lemons",
    "parts",
    *BANDWIDTH_KEYS,
    "goodput",
    "ettr",
    "whatif",
    "mttf",
    "survived",
    "causes",
    "codes",
    "together",
    "rolling",
    "states",
    "sizes",
    "loops",
    "signals",
    "repairs",
)


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report as JSON.

    Times in Unix nanoseconds; `records`: number of each kind in the window. `notes`: limits of the
    data, and information that the logs lack.
    """

    version: str
    source: str
    cluster: str  # "": none is named
    since_ns: int
    until_ns: int
    records: dict[str, int]
    headlines: list[Headline]
    sections: list[ReportSection]
    notes: list[str]


class DrawnReport(NamedTuple):
    """Report with the drawing functions of its sections."""

    report: FleetReport
    sections: list[DrawnSection]


def build_report(
    tables: Tables,
    source: str,
    *,
    cluster: str = "",
    notes: list[str] | None = None,
    above_gpus: int = LARGE_GPUS,
    on_progress: Callable[[int, int], None] = lambda _done, _all: None,
    on_section: Callable[[DrawnSection], object] = lambda _: None,
) -> DrawnReport:
    """Build the report.

    `source`: name of the origin of `tables`; `notes`: known limits of the data; `above_gpus`: size
    of jobs above which r_f is measured. `on_section` is called with each section as soon as it is
    ready. All records are read into memory once.
    """
    facts = ReportFacts(load_tables(tables), above_gpus)
    drawn: list[DrawnSection] = []
    for section in report_sections(facts):
        drawn.append(section)
        on_section(section)
        on_progress(len(drawn), max(len(drawn), len(ORDER) - len(BANDWIDTH_KEYS)))
    return finished_report(facts, drawn, source, cluster=cluster, notes=notes)


def finished_report(
    facts: ReportFacts,
    drawn: list[DrawnSection],
    source: str,
    *,
    cluster: str = "",
    notes: list[str] | None = None,
) -> DrawnReport:
    """Return the report of all `report_sections`. `source`, `notes`: as of `build_report`."""
    tables = facts.tables
    drawn = sorted(drawn, key=lambda entry: ORDER.index(entry.section.key))
    in_window = clip_tables(tables, tables.since_ns, tables.until_ns)
    records = {
        name: int(frame.select(pl.len()).collect().item())
        for name, frame in in_window._asdict().items()
        if isinstance(frame, pl.LazyFrame)
    }
    report = FleetReport(
        version=__version__,
        source=source,
        cluster=cluster,
        since_ns=tables.since_ns,
        until_ns=tables.until_ns,
        records=records,
        headlines=headlines(facts, drawn),
        sections=[entry.section for entry in drawn],
        notes=[*_sparse_data_notes(facts, records), *(notes or [])],
    )
    return DrawnReport(report, drawn)


def report_sections(facts: ReportFacts) -> Iterator[DrawnSection]:
    """Yield the sections, the slowest last, so that the others are drawn or read meanwhile."""
    for each in (
        failure_sections.mttf_section,
        failure_sections.survived_failures_section,
        failure_sections.causes_section,
        failure_sections.error_codes_section,
        failure_sections.cooccurrence_section,
        failure_sections.rate_history_section,
        failure_sections.final_states_section,
        failure_sections.job_sizes_section,
        failure_sections.outages_section,
    ):
        yield each(facts)
    yield from bandwidth_sections(facts.tables)
    yield from cost_and_lemon_sections.lemon_sections(facts)
    runs = cost_and_lemon_sections.training_runs(facts)
    yield cost_and_lemon_sections.ettr_section(runs)
    yield cost_and_lemon_sections.counterfactual_section(facts, runs)
    yield cost_and_lemon_sections.goodput_section(facts)
    yield cost_and_lemon_sections.crash_loops_section(facts)


def load_tables(tables: Tables) -> Tables:
    """Return the tables in memory."""
    frames = {
        name: frame.collect().lazy()
        for name, frame in tables._asdict().items()
        if isinstance(frame, pl.LazyFrame)
    }
    return tables._replace(**frames)


def _sparse_data_notes(facts: ReportFacts, records: dict[str, int]) -> list[str]:
    tables = facts.tables
    notes = []
    days = (tables.until_ns - tables.since_ns) / DAY_NS
    if not records["jobs"]:
        notes.append("no job is in this window: figures of jobs are empty")
    if days < SHORT_DAYS:
        notes.append(f"{days:.1f} days: too short for rates that change from week to week")
    if records["jobs"] and facts.rate.failures < failure_sections.FEW:
        notes.append(
            f"r_f rests on {plural(facts.rate.failures, 'failure')}: see the width of its interval"
        )
    notes += failure_sections.uncounted_failures_notes(facts)
    notes += exposure.dominant_attempts(tables)
    if records["outages"] or records["repairs"]:
        notes += exposure.inventory_notes(tables)
    if records["jobs"] and not records["findings"]:
        notes.append(
            "no health findings are in this window: only NODE_FAIL counts as a failure of"
            " infrastructure, and causes are unknown"
        )
    return notes + _coverage_notes(tables)


def _coverage_notes(tables: Tables) -> list[str]:
    """Return a note if findings cover only a part of the window.

    Failures outside of that part are attributed by findings alone are missed, and rates are too
    low.
    """
    inside = pl.col("t_ns").is_between(tables.since_ns, tables.until_ns, closed="left")
    times = tables.findings.filter(inside).select("t_ns").collect()["t_ns"]
    ran = tables.jobs.select(pl.col("start_ns").is_not_null().any()).collect().item()
    if not len(times) or not ran:
        return []
    span = tables.until_ns - tables.since_ns
    long_ns = max(2 * DAY_NS, UNCOVERED_SHARE * span, UNCOVERED_GAPS * span / len(times))
    first = int(times.to_numpy().min())
    last = int(times.to_numpy().max())
    if first - tables.since_ns <= long_ns and tables.until_ns - last <= long_ns:
        return []
    return [
        f"health findings are known from {format_time(first)} to {format_time(last)} only: failures"
        " outside of that time are undercounted, unless there was no finding"
    ]


def hidden_record_notes(sources: Sequence[LakeSource]) -> list[str]:
    """Return the logs' notes, the anomalous records kept, and the number of rejected rows."""
    noted: dict[str, list[str]] = defaultdict(list)
    odd: dict[str, int] = defaultdict(int)
    for log in sources:
        for note in dict.fromkeys(log.notes):
            noted[note].append(log.name)
        for what, rows in log.odd.items():
            odd[what] += rows
    lines = [f"{_describe_logs(names)}: {note}" for note, names in noted.items()]
    lines += [f"{rows:,} records are unusual, but kept: {what}" for what, rows in odd.items()]
    rejected = sum(sum(log.rejects.values()) for log in sources)
    if rejected:
        lines.append(f"{rejected:,} rows could not be read: rejects/ of the lake has them")
    return lines


def _describe_logs(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"


def render_page(drawn: DrawnReport, figures: dict[str, str]) -> str:
    """Return the page. `figures`: an SVG element for each section that has one, by its key."""
    environment = Environment(
        loader=PackageLoader("outlast.fleet.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.globals.update(format_cell=format_cell)
    return environment.get_template("report_page.html.j2").render(
        report=drawn.report,
        extent=describe_extent(drawn.report),
        sections=[entry.section for entry in drawn.sections],
        figures={key: figure for key, figure in figures.items() if figure},
        rows_shown=ROWS_SHOWN,
    )


def describe_extent(report: FleetReport) -> str:
    """Describe the cluster, the period and the number of records."""
    since, until = (_format_minute(end_ns) for end_ns in (report.since_ns, report.until_ns))
    days = (report.until_ns - report.since_ns) / 86_400e9
    of = f"{report.cluster}, " if report.cluster else ""
    counts = ", ".join(plural(n, kind[:-1]) for kind, n in report.records.items() if n)
    return f"{of}{since} to {until} UTC, {days:.1f} days: {counts}"


def _format_minute(t_ns: int) -> str:
    return f"{dt.datetime.fromtimestamp(t_ns / 1e9, tz=dt.UTC):%Y-%m-%d %H:%M}"


def format_cell(value: Any, column: ReportColumn) -> str:
    """Return a value as text for this column; "" for None."""
    if value is None:
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return "never" if value > 0 else ""
    match column.unit:
        case "GPU hours" if 0 < value < 10:
            return f"{value:.2g}"
        case "count" | "GPU hours":
            return f"{value:,.0f}"
        case "share":
            return f"{100 * value:.3g} %"
        case "hours":
            return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
        case "p":
            return f"{value:.1g}"
        case "times" | "rate":
            return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
        case _:
            return str(value)
