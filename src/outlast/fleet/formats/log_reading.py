"""Bounded reading of untrusted log files: batches of records, rejects, totals.

Every reader (accounting as text or JSON, a mapped table, kernel lines) returns a `LogReading`. A
log may be larger than memory, so it is read lazily, part by part:

    reading = sacct.read_sacct(path, options)
    for part in reading:
        ...                       # part.tables: records; part.rejects: unreadable rows
    reading.totals.check()        # after the last part
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
VANISHED = "a time that the zone leaves out in spring: these times are of another zone"
NO_UTF8 = "bytes that are no UTF-8: replaced"
TEXT_CHARS_MAX = 1000  # of a reject: enough to recognise the row, in bounded space


class Reject(msgspec.Struct, frozen=True):
    """Row that could not be read."""

    source: str
    line: int  # from 1 on; in JSON the place in the list, from 1 on; 0: the file as a whole
    reason: str  # the same words for all rows with this fault, so that they can be counted
    text: str


class RecordBatch(NamedTuple):
    """Some records of a log, with exactly the columns of their kinds, and some of its rejects.

    `attempt` of a job is counted within the batch alone; merging batches renumbers it.
    """

    tables: dict[Name, pl.DataFrame]
    rejects: list[Reject]


class ReadTotals(msgspec.Struct):
    """Counts of a log's rows.

    A row is one record of the source, over any number of lines; it is counted in exactly one of
    `records`, `skipped` and `rejects`.
    """

    rows: int = 0
    records: Counter[Name] = msgspec.field(default_factory=Counter)
    skipped: Counter[str] = msgspec.field(default_factory=Counter)  # no records by their nature
    rejects: Counter[str] = msgspec.field(default_factory=Counter)  # by reason
    more: int = 0  # records beyond the one that a row is: a fault is an outage and a finding
    odd: Counter[str] = msgspec.field(default_factory=Counter)  # records kept in spite of this
    notes: list[str] = msgspec.field(default_factory=list)  # what this log cannot show, and why
    quoted: list[str] = msgspec.field(default_factory=list)  # notes with words of the log's own
    names_node: bool = True  # False: equal logs may be of two nodes, or of two clusters

    def check(self) -> None:
        """Check that every row is accounted for.

        Raises AssertionError, which is a fault of the reader, never of the log.
        """
        placed = self.records.total() + self.skipped.total() + self.rejects.total()
        rows = self.rows + self.more
        assert rows == placed, f"{rows} rows were read, but {placed} are accounted for"


class LogReading:
    """One log, read once from its beginning. `totals` is complete after the last part."""

    def __init__(
        self,
        source: str,
        format: str,  # noqa: A002
        parts: Callable[[ReadTotals], Iterable[RecordBatch]],
    ) -> None:
        """Wrap a reader; `parts` counts rows, skipped ones and anomalies."""
        self.source = source
        self.format = format
        self.totals = ReadTotals()
        self._parts = iter(parts(self.totals))

    def __iter__(self) -> Iterator[RecordBatch]:
        return self

    def __next__(self) -> RecordBatch:
        """Return the next batch. Raises SourceError, also in the middle of a log."""
        part = next(self._parts)
        for name, table in part.tables.items():
            assert table.schema == schema(KIND_OF[name]), f"{name} has other columns"
            self.totals.records[name] += table.height
        self.totals.rejects.update(reject.reason for reject in part.rejects)
        return part


def number_attempts(jobs: pl.DataFrame) -> pl.DataFrame:
    """Number `attempt` by start among each job's records in this table."""
    key = jobs["job"].hash()
    if key.n_unique() == jobs.height:  # as in most parts: without a requeued job
        return jobs.with_columns(attempt=pl.lit(0, pl.Int64))
    began = pl.coalesce("start_ns", "submit_ns", "t_ns")
    order = began.rank("ordinal").over("cluster", "job").cast(pl.Int64) - 1
    several = key.is_duplicated()
    some = jobs.filter(several).with_columns(attempt=order)["attempt"]
    zeros = pl.Series("attempt", [0], pl.Int64).new_from_index(0, jobs.height)
    return jobs.with_columns(zeros.scatter(several.arg_true(), some))


def make_reject(source: str, line: int, reason: str, text: str) -> Reject:
    """Return a reject with its text cut to TEXT_CHARS_MAX."""
    return Reject(source, line, reason, text[:TEXT_CHARS_MAX])


GZIP = b"\x1f\x8b"
UNPACKED_RATIO = 200  # accounting is packed 10 to 40 times; a bomb 1000 times
UNPACKED_BYTES = 128 << 20  # what any file may unpack to
HEAD_BYTES = 4096
NULS_LEAST = 4  # one byte of so many is zero in no log in UTF-8
LINE_CHARS_MAX = 4 << 20
_OTHERS = {  # beginnings of files that are not supported
    b"\x28\xb5\x2f\xfd": "is compressed with zstd: unpack it first",
    b"BZh": "is compressed with bzip2: unpack it first",
    b"\xfd7zXZ": "is compressed with xz: unpack it first",
    b"PK\x03\x04": "is an archive: unpack it first",
    b"PAR1": "is a Parquet file, and not text: write it as CSV first",
    b"apiVersion: ": "is YAML: export it as JSON (kubectl get -o json)",
    b"---\napiVersion: ": "is YAML: export it as JSON (kubectl get -o json)",
    b"\xff\xfe": "is UTF-16, as PowerShell writes it: convert it to UTF-8 first",
    b"\xfe\xff": "is UTF-16: convert it to UTF-8 first",
}


def refuse_special_file(path: Path) -> None:
    """Refuse pipes, devices and directories: a pipe blocks, a device never ends.

    Raises UsageError, SourceError if the file cannot be examined.
    """
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
    """Open a file, transparently gunzipped.

    Raises OSError; reading raises it for damaged data, and SourceError for an implausible
    compression ratio.
    """
    file = path.open("rb")
    if file.peek(2)[:2] != GZIP:
        return file
    file.close()
    return cast(BinaryIO, _Unpacked(path))


def refuse_foreign_format(path: Path, head: bytes) -> None:
    """Refuse a file that must be unpacked or converted first. Raises SourceError."""
    for magic, what in _OTHERS.items():
        if head.startswith(magic):
            raise SourceError(f"{path} {what}; nothing was read")
    if head[:HEAD_BYTES].count(0) * NULS_LEAST > len(head[:HEAD_BYTES]):
        raise SourceError(
            f"{path} has zero bytes as UTF-16 has: convert it to UTF-8 first; nothing was read"
        )


def open_text(path: Path, newline: str | None = None) -> TextIO:
    """Open a file as text, transparently gunzipped; invalid UTF-8 is replaced.

    Raises as `open_unpacked` does.
    """
    return TextIOWrapper(open_unpacked(path), "utf-8-sig", "replace", newline)


def read_bounded(path: Path, bytes_max: int, hint: str) -> bytes:
    """Read all bytes of a file, gunzipped.

    Raises SourceError, with `hint`, for more than `bytes_max`, and if it cannot be read.
    """
    try:
        with open_unpacked(path) as file:
            data = file.read(bytes_max + 1)
    except (OSError, EOFError) as error:
        raise unreadable_error(path, error) from error
    if len(data) > bytes_max:
        raise SourceError(f"{path} has over {bytes_max >> 20:,} MiB, and is read whole: {hint}")
    return data.removeprefix(b"\xef\xbb\xbf")


def unreadable_error(path: Path, error: Exception) -> SourceError:
    """Return the SourceError for a file that could not be read to its end."""
    reason = error.strerror if isinstance(error, OSError) else None
    return SourceError(f"{path} cannot be read to its end: {reason or error}; nothing was changed")


def bounded_lines(file: TextIO) -> Iterator[str]:
    """Yield the lines of a text, cut to LINE_CHARS_MAX."""
    while line := file.readline(LINE_CHARS_MAX):
        rest = line
        while len(rest) == LINE_CHARS_MAX and not rest.endswith("\n"):
            rest = file.readline(LINE_CHARS_MAX)
        yield line


class _Unpacked(gzip.GzipFile):
    """Gzip file with a limit on its unpacked size."""

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
