"""Sections of a report: described columns, rows, notes and a figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import polars as pl

from outlast.fleet.analysis import lemons
from outlast.fleet.analysis.failure_attribution import AttributedFailures
from outlast.fleet.analysis.failure_rates import FailureRate
from outlast.fleet.record_tables import Tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Unit = Literal["", "count", "share", "hours", "days", "GPU hours", "times", "day", "p", "rate"]
SERIES_MAX = 20_000
ROWS_MAX = 1000  # of a table in a report; there is a note where there are more


class ReportColumn(msgspec.Struct, frozen=True):
    """`key`: in the rows; `said`: above the column, for people."""

    key: str
    said: str
    unit: Unit = ""


class ReportSection(msgspec.Struct, frozen=True, kw_only=True):
    """One table: `said` is what it says and how it is counted; its rows have the keys of its
    columns. `notes`: what is to be kept in mind with these data."""

    key: str
    title: str
    said: str
    columns: list[ReportColumn]
    rows: list[dict[str, Any]]
    notes: list[str]
    series: list[dict[str, Any]] = []  # what a picture shows beyond the rows


class ReportFacts(NamedTuple):
    """What several sections need, worked out once. `infra`: KEY and node of attempts that
    infrastructure ended; `preempted`: for jobs that began again after that, or in a crash loop."""

    tables: Tables
    found: AttributedFailures
    infra: pl.LazyFrame
    rate: FailureRate
    preempted: pl.DataFrame

    @property
    def by(self) -> lemons.FailureBasis:
        """What shows failures: jobs, or where none ran, outages."""
        return lemons.failure_basis(self.tables)

    @property
    def node_rate_per_s(self) -> float:
        return (self.rate.per_1000_node_days or 0.0) / 1000 / 86_400


class DrawnSection(NamedTuple):
    """A section, and what draws it: None where there is nothing to be seen."""

    section: ReportSection
    draw: Callable[[Figure], None] | None = None


def make_section(
    key: str,
    title: str,
    said: str,
    columns: list[ReportColumn],
    frame: pl.DataFrame,
    notes: list[str] | None = None,
    series: pl.DataFrame | None = None,
) -> ReportSection:
    """Of the `columns` of a frame, its first ROWS_MAX rows."""
    told = list(notes or [])
    if len(frame) > ROWS_MAX:
        told.append(f"{len(frame):,} rows: the first {ROWS_MAX:,} are here")
    rows = frame.select([one.key for one in columns]).head(ROWS_MAX).to_dicts()
    drawn = [] if series is None else series.head(SERIES_MAX).to_dicts()
    return ReportSection(
        key=key, title=title, said=said, columns=columns, rows=rows, notes=told, series=drawn
    )
