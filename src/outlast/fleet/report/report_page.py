"""HTML page of a report: no script, nothing fetched, every text escaped."""

from __future__ import annotations

import datetime as dt
import math
from html import escape
from typing import Any

from outlast.fleet.report.fleet_report import DrawnReport, FleetReport
from outlast.fleet.report.report_sections import DrawnSection, ReportColumn, ReportSection
from outlast.text_formatting import plural

SHOWN = 15  # rows; the others are collapsed
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto;
  max-width: 62rem; padding: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .3rem; }
p { margin: .4rem 0; } .dim { color: #595959; } .note { border-left: 3px solid #d55e00;
  padding-left: .6rem; margin: .4rem 0; }
.heads { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 1rem;
  margin: 1.5rem 0; padding: 0; list-style: none; }
.heads li { border-top: 3px solid #0072b2; padding-top: .4rem; }
.heads b { display: block; font-size: 1.7rem; line-height: 1.2; }
.heads small { display: block; color: #595959; }
nav { display: flex; flex-wrap: wrap; gap: 0 .9rem; margin: 1rem 0; } a { color: #0072b2; }
figure { margin: .6rem 0; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; margin: .6rem 0; }
th { text-align: left; font-weight: 600; vertical-align: bottom; border-bottom: 1px solid #1a1a1a; }
th, td { padding: .15rem .7rem .15rem 0; } td { border-bottom: 1px solid #e3e3e3; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
svg { max-width: 100%; height: auto; } summary { cursor: pointer; color: #0072b2; }
@media print { nav { display: none; } h2, figure { break-inside: avoid; } }
"""


def render_page(drawn: DrawnReport, figures: dict[str, str]) -> str:
    """Return the page. `figures`: an SVG element for each section that has one, by its key."""
    report = drawn.report
    heads = "".join(
        f"<li><b>{escape(one.figure)}</b>{escape(one.said)}<small>{escape(one.rests_on)}</small>"
        "</li>"
        for one in report.headlines
    )
    links = "".join(
        f'<a href="#{escape(one.section.key)}">{escape(one.section.title)}</a>'
        for one in drawn.sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Second line of defence: no text of a log can load or run anything.
        '<meta http-equiv="Content-Security-Policy"'
        " content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Fleet report: {escape(report.source)}</title><style>{STYLE}</style></head><body>"
        f"<header><h1>Fleet report: {escape(report.source)}</h1>{_what(report)}</header>"
        f'<ul class="heads">{heads}</ul>'
        + "".join(f'<p class="note">{escape(one)}</p>' for one in report.notes)
        + f"<nav>{links}</nav><main>"
        + "".join(_section(one, figures.get(one.section.key, "")) for one in drawn.sections)
        + f'</main><footer class="dim"><p>outlast {escape(report.version)}. Definitions:'
        " docs/fleet.md; after Kokolis et al. 2025, arXiv 2410.21680.</p></footer></body></html>\n"
    )


def _what(report: FleetReport) -> str:
    since, until = (_when(one) for one in (report.since_ns, report.until_ns))
    days = (report.until_ns - report.since_ns) / 86_400e9
    of = f"{report.cluster}, " if report.cluster else ""
    counts = ", ".join(plural(n, kind[:-1]) for kind, n in report.records.items() if n)
    when = f"{of}{since} to {until} UTC, {days:.1f} days: {counts}"
    return f'<p class="dim">{escape(when)}</p>'


def _when(t_ns: int) -> str:
    return f"{dt.datetime.fromtimestamp(t_ns / 1e9, tz=dt.UTC):%Y-%m-%d %H:%M}"


def _section(drawn_section: DrawnSection, figure: str) -> str:
    one = drawn_section.section
    drawn = f"<figure>{figure}</figure>" if figure else ""
    notes = "".join(f'<p class="note">{escape(text)}</p>' for text in one.notes)
    return (
        f'<section id="{escape(one.key)}"><h2>{escape(one.title)}</h2>'
        f'<p class="dim">{escape(one.said)}</p>{notes}{drawn}{_table(one)}</section>'
    )


def _table(of: ReportSection) -> str:
    if not of.rows:
        return "<p>None.</p>"
    first, rest = of.rows[:SHOWN], of.rows[SHOWN:]
    text = _rows(of, first)
    if rest:
        text += f"<details><summary>{len(rest):,} more</summary>{_rows(of, rest)}</details>"
    return text


def _rows(of: ReportSection, rows: list[dict[str, Any]]) -> str:
    head = "".join(f"<th{_right(one)}>{escape(one.said)}</th>" for one in of.columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td{_right(c)}>{escape(format_cell(row[c.key], c))}</td>" for c in of.columns)
        + "</tr>"
        for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _right(column: ReportColumn) -> str:
    return ' class="number"' if column.unit and column.unit != "day" else ""


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
