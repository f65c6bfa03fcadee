"""Bounded reading of untrusted log files: batches of records, rejects, totals.

Every reader (accounting as text or JSON, a mapped table, kernel lines) gives a `Reading`. A log may
be larger than memory, so nothing is read before somebody asks for the next part:

    reading = sacct.read(path, options)
    for part in reading:
        ...                       # part.tables: rows to keep; part.rejects: rows to set aside
    reading.totals.check()        # now that the parts are used up
"""

from __future__ import annotations

import gzip
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO, cast

import msgspec
import polars as pl

from outlast.errors import SourceError, UsageError
from outlast.fleet.record_tables import KIND_OF, Name, schema

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


class RecordBatch(NamedTuple):
    """Some of the records of a log, with exactly the columns of their kinds, and some of its
    rejects. `attempt` of a job is counted within the part alone: who puts parts together counts
    anew."""

    tables: dict[Name, pl.DataFrame]
    rejects: list[Reject]


class ReadTotals(msgspec.Struct):
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


class LogReading:
    """One log, read once from its beginning. `totals` is whole when the parts are used up."""

    def __init__(
        self,
        source: str,
        format: str,  # noqa: A002
        parts: Callable[[ReadTotals], Iterable[RecordBatch]],
    ) -> None:
        """`parts` counts rows, what it skips, and oddities; the rest is counted here."""
        self.source = source
        self.format = format
        self.totals = ReadTotals()
        self._parts = iter(parts(self.totals))

    def __iter__(self) -> Iterator[RecordBatch]:
        return self

    def __next__(self) -> RecordBatch:
        """Raises SourceError, also in the middle of a log."""
        part = next(self._parts)
        for name, table in part.tables.items():
            assert table.schema == schema(KIND_OF[name]), f"{name} has other columns"
            self.totals.records[name] += table.height
        self.totals.rejects.update(one.reason for one in part.rejects)
        return part

    def whole(self) -> RecordBatch:
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
            whole["jobs"] = number_attempts(whole["jobs"])
        return RecordBatch(whole, rejects)


def number_attempts(jobs: pl.DataFrame) -> pl.DataFrame:
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


def make_reject(source: str, line: int, reason: str, text: str) -> Reject:
    """With its text cut to what is kept."""
    return Reject(source, line, reason, text[:TEXT_CHARS_MAX])


GZIP = b"\x1f\x8b"
UNPACKED_RATIO = 200  # accounting is packed 10 to 40 times; a bomb 1000 times
UNPACKED_BYTES = 128 << 20  # what any file may unpack to
HEAD_BYTES, NULS_LEAST = 4096, 4  # one byte of so many is zero in no log in UTF-8
LINE_CHARS_MAX = 4 << 20
_OTHERS = {  # what a file begins with that nothing here reads
    b"\x28\xb5\x2f\xfd": "is compressed with zstd: unpack it first",
    b"BZh": "is compressed with bzip2: unpack it first",
    b"\xfd7zXZ": "is compressed with xz: unpack it first",
    b"PK\x03\x04": "is an archive: unpack it first",
    b"PAR1": "is a Parquet file, and not text: write it as CSV first",
    b"\xff\xfe": "is UTF-16, as PowerShell writes it: convert it to UTF-8 first",
    b"\xfe\xff": "is UTF-16: convert it to UTF-8 first",
}


def refuse_special_file(path: Path) -> None:
    """Raises UsageError for what is no file: a pipe would be waited for, a device never ends."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}; nothing was read") from error
    if stat.S_ISDIR(mode):
        raise UsageError(f"{path} is a directory, not a file; nothing was read")
    if not stat.S_ISREG(mode):
        raise UsageError(
            f"{path} is no file, but a pipe, a device or the like: write it to a file first;"
            " nothing was read"
        )


def open_unpacked(path: Path) -> BinaryIO:
    """Its bytes, gzip undone. Raises OSError; reading does so for what is damaged, and SourceError
    for what unpacks to far more than logs do."""
    file = path.open("rb")
    if file.peek(2)[:2] != GZIP:
        return file
    file.close()
    return cast(BinaryIO, _Unpacked(path))


def refuse_foreign_format(path: Path, head: bytes) -> None:
    """Raises SourceError for a file that begins as what has to be unpacked or converted first."""
    for magic, what in _OTHERS.items():
        if head.startswith(magic):
            raise SourceError(f"{path} {what}; nothing was read")
    if head[:HEAD_BYTES].count(0) * NULS_LEAST > len(head[:HEAD_BYTES]):
        raise SourceError(
            f"{path} has zero bytes as UTF-16 has: convert it to UTF-8 first; nothing was read"
        )


def open_text(path: Path, newline: str | None = None) -> TextIO:
    """Its characters, gzip undone; what is no UTF-8 is replaced. Raises as `unpacked` does."""
    return TextIOWrapper(open_unpacked(path), "utf-8-sig", "replace", newline)


def read_bounded(path: Path, bytes_max: int, hint: str) -> bytes:
    """All its bytes, gzip undone. Raises SourceError for what has more than `bytes_max`, with a
    `hint` of what to do then, and for what cannot be read."""
    try:
        with open_unpacked(path) as file:
            data = file.read(bytes_max + 1)
    except (OSError, EOFError) as error:
        raise unreadable_error(path, error) from error
    if len(data) > bytes_max:
        raise SourceError(f"{path} has over {bytes_max >> 20:,} MiB, and is read whole: {hint}")
    return data.removeprefix(b"\xef\xbb\xbf")


def unreadable_error(path: Path, error: Exception) -> SourceError:
    said = error.strerror if isinstance(error, OSError) else None
    return SourceError(f"{path} cannot be read to its end: {said or error}; nothing was changed")


def bounded_lines(file: TextIO) -> Iterator[str]:
    """Of a text; what a line has beyond LINE_CHARS_MAX is left out."""
    while line := file.readline(LINE_CHARS_MAX):
        rest = line
        while len(rest) == LINE_CHARS_MAX and not rest.endswith("\n"):
            rest = file.readline(LINE_CHARS_MAX)
        yield line


class _Unpacked(gzip.GzipFile):
    """Bounded by what was packed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self._path = path
        self._most = max(UNPACKED_BYTES, UNPACKED_RATIO * path.stat().st_size)

    def read(self, size: int | None = -1) -> bytes:
        return self._bounded(super().read, size)

    def read1(self, size: int = -1) -> bytes:
        return self._bounded(super().read1, size)

    def _bounded(self, read: Callable[[int], bytes], size: int | None) -> bytes:
        try:
            data = read(self._most + 1 if size is None or size < 0 else size)
        except zlib.error as error:
            raise gzip.BadGzipFile(f"damaged: {error}") from error
        if self.tell() > self._most:
            raise SourceError(
                f"{self._path} unpacks to over {UNPACKED_RATIO} times its size, as no log does;"
                " nothing was read. If it is one, unpack it first"
            )
        return data
