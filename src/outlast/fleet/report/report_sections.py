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
ROWS_MAX = 1000  # of a table in a report; more are noted


class ReportColumn(msgspec.Struct, frozen=True):
    """Column of a table.

    `key`: in the rows; `said`: heading.
    """

    key: str
    said: str
    unit: Unit = ""


class ReportSection(msgspec.Struct, frozen=True, kw_only=True):
    """One table of a report.

    `said`: its meaning and how it is counted; rows have the keys of `columns`. `notes`: caveats of
    these data.
    """

    key: str
    title: str
    said: str
    columns: list[ReportColumn]
    rows: list[dict[str, Any]]
    notes: list[str]
    series: list[dict[str, Any]] = []  # data of the figure beyond the rows


class ReportFacts(NamedTuple):
    """Results that several sections need, computed once.

    `infra`: KEY and node of attempts that infrastructure ended; `preempted`: for jobs that
    restarted after that, or in a crash loop.
    """

    tables: Tables
    found: AttributedFailures
    infra: pl.LazyFrame
    rate: FailureRate
    preempted: pl.DataFrame

    @property
    def by(self) -> lemons.FailureBasis:
        """The basis of failures: jobs, or outages if no job ran."""
        return lemons.failure_basis(self.tables)

    @property
    def node_rate_per_s(self) -> float:
        """Failures per node-second of large jobs (r_f); 0 if unknown."""
        return (self.rate.per_1000_node_days or 0.0) / 1000 / 86_400


class DrawnSection(NamedTuple):
    """Section and its drawing function; None without anything to draw."""

    section: ReportSection
    draw: Callable[[Figure], None] | None = None


def make_section(
    key: str,
    title: str,
    description: str,
    columns: list[ReportColumn],
    frame: pl.DataFrame,
    notes: list[str] | None = None,
    series: pl.DataFrame | None = None,
) -> ReportSection:
    """Return a section of the `columns` of a frame, with its first ROWS_MAX rows."""
    all_notes = list(notes or [])
    if len(frame) > ROWS_MAX:
        all_notes.append(f"{len(frame):,} rows: the first {ROWS_MAX:,} are here")
    rows = frame.select([one.key for one in columns]).head(ROWS_MAX).to_dicts()
    drawn = [] if series is None else series.head(SERIES_MAX).to_dicts()
    return ReportSection(
        key=key,
        title=title,
        said=description,
        columns=columns,
        rows=rows,
        notes=all_notes,
        series=drawn,
    )
