"""What reading one log gives: its records in parts, the rows that could not be read, and the sums.

Every reader (accounting as text or JSON, a mapped table, kernel lines) gives a `Reading`. A log may
be larger than memory, so nothing is read before somebody asks for the next part:

    reading = sacct.read(path, options)
    for part in reading:
        ...                       # part.tables: rows to keep; part.rejects: rows to set aside
    reading.totals.check()        # now that the parts are used up
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec
import polars as pl

from outlast.errors import SourceError
from outlast.fleet.tables import KIND_OF, Name, schema

ZONE_ASSUMED = "times without a zone were taken for UTC: --zone NAME reads them in another"
TWICE = "times that the zone's clocks showed twice: the first was taken"
NO_UTF8 = "bytes that are no UTF-8: replaced"
TEXT_CHARS_MAX = 1000  # of a reject: enough to recognise the row, in bounded space


class Reject(msgspec.Struct, frozen=True):
    """A row that could not be read."""

    source: str
    line: int  # from 1 on; in JSON the place in the list, from 1 on; 0: the file as a whole
    reason: str  # the same words for all rows with this fault, so that they can be counted
    text: str


class Part(NamedTuple):
    """Some of the records of a log, with exactly the columns of their kinds, and some of its
    rejects. `attempt` of a job is counted within the part alone: who puts parts together counts
    anew."""

    tables: dict[Name, pl.DataFrame]
    rejects: list[Reject]


class Totals(msgspec.Struct):
    """What became of the rows of a log. One row is one record of the source, over how many lines
    it may ever go: it is in `records`, in `skipped` or in `rejects`, and in one of them only."""

    rows: int = 0
    records: Counter[Name] = msgspec.field(default_factory=Counter)
    skipped: Counter[str] = msgspec.field(default_factory=Counter)  # no records by their nature
    rejects: Counter[str] = msgspec.field(default_factory=Counter)  # by reason
    more: int = 0  # records beyond the one that a row is: a fault is an outage and a finding
    odd: Counter[str] = msgspec.field(default_factory=Counter)  # records kept in spite of this
    notes: list[str] = msgspec.field(default_factory=list)  # what this log cannot show, and why
    quoted: list[str] = msgspec.field(default_factory=list)  # notes with words of the log's own

    def check(self) -> None:
        """Nothing vanished. Raises AssertionError: a fault of the reader, never of the log."""
        placed = self.records.total() + self.skipped.total() + self.rejects.total()
        rows = self.rows + self.more
        assert rows == placed, f"{rows} rows were read, but {placed} are accounted for"


class Reading:
    """One log, read once from its beginning. `totals` is whole when the parts are used up."""

    def __init__(self, source: str, format: str, parts: Callable[[Totals], Iterable[Part]]) -> None:  # noqa: A002
        """`parts` counts rows, what it skips, and oddities; the rest is counted here."""
        self.source = source
        self.format = format
        self.totals = Totals()
        self._parts = iter(parts(self.totals))

    def __iter__(self) -> Iterator[Part]:
        return self

    def __next__(self) -> Part:
        """Raises SourceError, also in the middle of a log."""
        part = next(self._parts)
        for name, table in part.tables.items():
            assert table.schema == schema(KIND_OF[name]), f"{name} has other columns"
            self.totals.records[name] += table.height
        self.totals.rejects.update(one.reason for one in part.rejects)
        return part

    def whole(self) -> Part:
        """All that is left at once, attempts counted: for logs that fit into memory. Raises
        SourceError if no row of the log could be read."""
        tables: dict[Name, list[pl.DataFrame]] = {}
        rejects: list[Reject] = []
        for part in self:
            for name, table in part.tables.items():
                tables.setdefault(name, []).append(table)
            rejects += part.rejects
        self.totals.check()
        if rejects and not self.totals.records.total() and not self.totals.skipped.total():
            ((reason, rows),) = self.totals.rejects.most_common(1)
            raise SourceError(
                f"{self.source}: none of its {self.totals.rows} rows could be read as"
                f" {self.format}; {rows} of them: {reason} (line {rejects[0].line}:"
                f" {rejects[0].text[:100]!r})"
            )
        whole: dict[Name, pl.DataFrame] = {name: pl.concat(found) for name, found in tables.items()}
        if "jobs" in whole:
            whole["jobs"] = numbered(whole["jobs"])
        return Part(whole, rejects)


def numbered(jobs: pl.DataFrame) -> pl.DataFrame:
    """With `attempt` counted by start among the records of each job that are in this table."""
    key = jobs["job"].hash()
    if key.n_unique() == jobs.height:  # as in most parts: nobody was requeued
        return jobs.with_columns(attempt=pl.lit(0, pl.Int64))
    began = pl.coalesce("start_ns", "submit_ns", "t_ns")
    order = began.rank("ordinal").over("cluster", "job").cast(pl.Int64) - 1
    several = key.is_duplicated()
    some = jobs.filter(several).with_columns(attempt=order)["attempt"]
    zeros = pl.Series("attempt", [0], pl.Int64).new_from_index(0, jobs.height)
    return jobs.with_columns(zeros.scatter(several.arg_true(), some))


def reject(source: str, line: int, reason: str, text: str) -> Reject:
    """With its text cut to what is kept."""
    return Reject(source, line, reason, text[:TEXT_CHARS_MAX])
