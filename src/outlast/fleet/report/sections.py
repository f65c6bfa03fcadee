"""What a report is made of: tables with what their columns mean, and a picture of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import polars as pl

from outlast.fleet import lemons
from outlast.fleet.attribution import Attributed
from outlast.fleet.mttf import FailureRate
from outlast.fleet.tables import Tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Unit = Literal["", "count", "share", "hours", "days", "GPU hours", "times", "day", "p", "rate"]
SERIES_MAX = 20_000
ROWS_MAX = 1000  # of a table in a report; there is a note where there are more


class Column(msgspec.Struct, frozen=True):
    """`key`: in the rows; `said`: above the column, for people."""

    key: str
    said: str
    unit: Unit = ""


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One table: `said` is what it says and how it is counted; its rows have the keys of its
    columns. `notes`: what is to be kept in mind with these data."""

    key: str
    title: str
    said: str
    columns: list[Column]
    rows: list[dict[str, Any]]
    notes: list[str]
    series: list[dict[str, Any]] = []  # what a picture shows beyond the rows


class Facts(NamedTuple):
    """What several sections need, worked out once. `infra`: KEY and node of attempts that
    infrastructure ended; `preempted`: for jobs that began again after that, or in a crash loop."""

    tables: Tables
    found: Attributed
    infra: pl.LazyFrame
    rate: FailureRate
    preempted: pl.DataFrame

    @property
    def by(self) -> lemons.By:
        """What shows failures: jobs, or where none ran, outages."""
        return lemons.known_by(self.tables)

    @property
    def node_rate_per_s(self) -> float:
        return (self.rate.per_1000_node_days or 0.0) / 1000 / 86_400


class Told(NamedTuple):
    """A section, and what draws it: None where there is nothing to be seen."""

    section: Section
    draw: Callable[[Figure], None] | None = None


def section(
    key: str,
    title: str,
    said: str,
    columns: list[Column],
    frame: pl.DataFrame,
    notes: list[str] | None = None,
    series: pl.DataFrame | None = None,
) -> Section:
    """Of the `columns` of a frame, its first ROWS_MAX rows."""
    told = list(notes or [])
    if len(frame) > ROWS_MAX:
        told.append(f"{len(frame):,} rows: the first {ROWS_MAX:,} are here")
    rows = frame.select([one.key for one in columns]).head(ROWS_MAX).to_dicts()
    drawn = [] if series is None else series.head(SERIES_MAX).to_dicts()
    return Section(
        key=key, title=title, said=said, columns=columns, rows=rows, notes=told, series=drawn
    )
