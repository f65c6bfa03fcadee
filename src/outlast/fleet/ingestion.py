"""Ingestion of logs into a lake: detected, read in parts, committed atomically."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import polars as pl
import xxhash

from outlast.errors import SourceError, UsageError
from outlast.fleet.formats.format_detection import (
    PLACE_FLAGS,
    Format,
    LogOptions,
    detect_format,
    open_log,
    reading_options,
    refuse_unused_options,
)
from outlast.fleet.formats.log_reading import LogReading, RecordBatch, Reject, refuse_special_file
from outlast.fleet.lake import LakePart, LakeSource, format_time, scan
from outlast.fleet.lake_writer import AddedRecords, DoubleBooking, LakeWriter, open_writer
from outlast.fleet.pseudonyms import Pseudonyms
from outlast.fleet.record_tables import Name

AHEAD = "records of a time in the future, which only --until reaches: is the zone right?"
EXAMPLES_MAX = 3  # of rejects, for each reason
SHIFT_NS = 900 * 10**9  # offsets of zones differ by multiples of a quarter of an hour
SHIFT_NS_MAX = 26 * 3600 * 10**9
SHIFTED_MIN = 3  # by chance it is one
REJECTS_MAX = 200_000  # of a log with almost no valid rows: its format is another one
_BLOCK_BYTES = 1 << 22


class IngestedLog(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one log.

    `before`: its content was in the lake already, so it was not read. `differing`: options that
    differ between that reading and this one, by flag; its records are those of the former.
    """

    source: LakeSource
    before: bool = False
    differing: tuple[str, ...] = ()
    examples: tuple[Reject, ...] = ()


class IngestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an ingestion; `rows`, `since_ns` and `until_ns` are of the lake afterwards."""

    lake: str
    read: tuple[IngestedLog, ...]
    added: dict[Name, AddedRecords]
    rows: dict[Name, int]
    since_ns: int | None
    until_ns: int | None
    odd: tuple[str, ...] = ()


class _Log(NamedTuple):
    """A log before it is read.

    `digest`: of content, cluster and node, for a log that does not name its node: two nodes can
    have the same one. `content_digest`: of the content alone, for the others.
    """

    path: Path
    format: Format
    digest: str
    content_digest: str
    size_bytes: int
    options: dict[str, str]

    def differing(self, source: LakeSource) -> tuple[str, ...]:
        """Return the options, by flag, that differ from those of an earlier reading."""
        before = source.options
        if before is None:
            return ()
        flags = {**before, **self.options}
        is_same_place = source.digest == self.digest  # which older versions do not have as options
        return tuple(
            flag
            for flag in flags
            if before.get(flag) != self.options.get(flag)
            and not (is_same_place and flag in PLACE_FLAGS)
        )


def ingest(
    lake: Path,
    paths: Sequence[Path],
    options: LogOptions,
    names: Pseudonyms | None = None,
    on_progress: Callable[[str, int], None] = lambda _source, _rows: None,
) -> IngestSummary:
    """Read logs into a lake.

    `names` replaces those of people, hosts and clusters. `on_progress` is called with the log's
    name and the number of rows read. Raises UsageError, SourceError (a log of unknown format or
    without a valid row), LakeError and StorageError; the lake is then unchanged.
    """
    logs = [
        _log(path, options, names) for path in paths
    ]  # unreadable logs are refused before any is read
    refuse_unused_options({log.format for log in logs}, options)
    with open_writer(lake) as writer:
        _refuse_other_names(writer, names)
        known = {source.digest: source for source in writer.manifest.sources}
        found: list[IngestedLog] = []
        for log in logs:
            source = known.get(log.content_digest) or known.get(log.digest)
            if source is not None:
                differing = log.differing(source)
                found.append(IngestedLog(source=source, before=True, differing=differing))
                continue
            found.append(_read(writer, log, options, names, on_progress))
            known[found[-1].source.digest] = found[-1].source
        new = [log.source for log in found if not log.before]
        anonymous = names.mark if names else ""
        added = writer.commit(new, anonymous) if new else {}
        parts = writer.manifest.parts
        twice = writer.doubles
        shifted = _shifted_notes(lake, parts, new)  # other ingestions may merge these parts later
    rows: Counter[Name] = Counter()
    for part in parts:
        rows[part.kind] += part.rows
    return IngestSummary(
        lake=str(lake),
        read=tuple(found),
        added=added,
        rows=dict(rows),
        since_ns=min((part.first_ns for part in parts), default=None),
        until_ns=max((part.last_ns for part in parts), default=None),
        odd=(*_double_booking_notes(twice), *shifted),
    )


def _double_booking_notes(found: list[DoubleBooking]) -> tuple[str, ...]:
    nodes = {(booking.cluster, booking.node) for booking in found}
    if not nodes:
        return ()
    first = found[0]
    return (
        f"{len(nodes):,} nodes are double-booked, as {first.node}: at"
        f" {format_time(first.t_ns)} its jobs had {first.gpus} GPUs, and none had over {first.most}"
        " of a node;"
        " do clocks disagree, or are two clusters under one name?",
    )


def _shifted_notes(
    path: Path, parts: Sequence[LakePart], new: Sequence[LakeSource]
) -> tuple[str, ...]:
    """Note attempts that are in the lake twice, in two zones.

    They waited and ran equally long to the second, and all their times differ by one offset of
    zones. A requeued job hardly waits so.
    """
    since_ns = min((s.since_ns for s in new if s.since_ns is not None), default=0)
    until_ns = max((s.until_ns for s in new if s.until_ns is not None), default=0)
    near = [
        part
        for part in parts
        if part.kind == "jobs"
        and part.last_ns >= since_ns - SHIFT_NS_MAX
        and part.first_ns <= until_ns + SHIFT_NS_MAX
    ]
    start, same = pl.col("start_ns"), ("cluster", "job", "waited", "ran")
    shift = start - start.shift().over(same)
    shifted = (
        scan(path, near, "jobs")
        .filter(start.is_not_null() & pl.col("submit_ns").is_not_null())
        .select("cluster", "job", start, waited=start - "submit_ns", ran=pl.col("t_ns") - start)
        .sort("start_ns")
        .with_columns(shift=shift)
        .filter((pl.col("shift") % SHIFT_NS == 0) & pl.col("shift").is_between(1, SHIFT_NS_MAX))
        .group_by("shift")
        .agg(jobs=pl.col("job").n_unique(), job=pl.col("job").first())
        .filter(pl.col("jobs") >= SHIFTED_MIN)
        .sort("jobs", descending=True)
        .collect()
    )
    return tuple(
        f"attempts of {jobs:,} jobs are in the lake twice, {ns / 3.6e12:g} h apart in all their"
        f" times, as {job}: one of these logs was read in another zone than the other; read all of"
        " them into a new lake, each with its --zone"
        for ns, jobs, job in shifted.head(1).iter_rows()
    )


def _log(path: Path, options: LogOptions, names: Pseudonyms | None) -> _Log:
    format_ = detect_format(path, options)
    open_log(path, format_, options)  # a missing option is an error now, not in an hour
    files = sorted(path.rglob("*.seg")) if path.is_dir() else [path]
    digest = xxhash.xxh3_128()
    size = 0
    try:
        for file in files:
            refuse_special_file(file)
            with file.open("rb") as content:
                while block := content.read(_BLOCK_BYTES):
                    digest.update(block)
                    size += len(block)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}; nothing was read") from error
    content = digest.hexdigest()
    place = f"{content} {options.cluster} {options.node_of(path)}"
    place += f" {options.label_of(path)}" if options.label else ""

    def digested(text: str) -> str:
        if names:
            return names.replaced("digest", text)
        return xxhash.xxh3_128_hexdigest(text.encode())

    used = reading_options(path, format_, options)
    digests = {flag: digested(f"{flag} {value}") for flag, value in used.items()}
    return _Log(path, format_, digested(place), digested(f"{content} alone"), size, digests)


def _read(
    writer: LakeWriter,
    log: _Log,
    options: LogOptions,
    names: Pseudonyms | None,
    on_progress: Callable[[str, int], None],
) -> IngestedLog:
    identity = xxhash.xxh3_64_hexdigest(log.digest.encode())
    name = names.replaced("source", str(log.path)) if names else str(log.path)
    read_ns = time.time_ns()
    window = _Window(read_ns)
    examples: dict[str, list[Reject]] = {}
    reading = open_log(log.path, log.format, options)
    for part in _parts(log, reading):
        for reject in part.rejects:
            some = examples.setdefault(reject.reason, [])
            if len(some) < EXAMPLES_MAX:
                some.append(reject)
        stored = names.part(part, name) if names else part
        for kind, records in stored.tables.items():
            window.add(records)
            writer.add(kind, records)
        writer.reject(identity, stored.rejects)
        _refuse_noise(log, reading)
        on_progress(name, reading.totals.rows)
    _refuse_unreadable(log, reading, examples)
    totals = reading.totals
    source = LakeSource(
        id=identity,
        name=name,
        format=reading.format,
        digest=log.content_digest if totals.names_node else log.digest,
        size_bytes=log.size_bytes,
        read_ns=read_ns,
        rows=totals.rows,
        records=dict(+totals.records),
        skipped=dict(+totals.skipped),
        rejects=names.reasons(totals.rejects) if names else dict(totals.rejects),
        since_ns=window.since_ns,
        until_ns=window.until_ns,
        odd={**totals.odd, **window.odd},
        notes=(*totals.notes, *(() if names else totals.quoted)),
        options=log.options,
    )
    return IngestedLog(
        source=source, examples=tuple(reject for some in examples.values() for reject in some)
    )


def _parts(log: _Log, reading: LogReading) -> Iterator[RecordBatch]:
    """Yield the batches. Raises SourceError for a number too large for a record."""
    try:
        yield from reading
    except (pl.exceptions.PolarsError, OverflowError) as error:
        why = str(error).strip().partition("\n")[0]
        raise SourceError(
            f"{log.path} holds what no record can ({why}); the lake is unchanged"
        ) from error


class _Window:
    """Time span of a log's records, and the number of records in the future."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self.since_ns: int | None = None
        self.until_ns: int | None = None
        self.odd: Counter[str] = Counter()

    def add(self, records: pl.DataFrame) -> None:
        if not records.height:
            return
        times = records["t_ns"]
        least = int(str(times.min()))
        most = int(str(times.max()))
        self.since_ns = least if self.since_ns is None else min(self.since_ns, least)
        self.until_ns = most if self.until_ns is None else max(self.until_ns, most)
        if most > self.now_ns:
            ahead = times.filter(times > self.now_ns).len()
            self.odd[AHEAD] += ahead


def _refuse_noise(log: _Log, reading: LogReading) -> None:
    """Refuse a log with almost no valid rows: its rejects would fill the disk."""
    totals = reading.totals
    bad = totals.rejects.total()
    good = totals.records.total() + totals.skipped.total()
    if bad > REJECTS_MAX and good * 100 < bad:
        ((reason, rows),) = totals.rejects.most_common(1)
        raise SourceError(
            f"{log.path} was taken for {reading.format}, and of its first {bad + good:,} rows"
            f" {bad:,} could not be read; of {rows:,}: {reason}. Nothing was changed; name its"
            " format with --as"
        )


def _refuse_unreadable(log: _Log, reading: LogReading, examples: dict[str, list[Reject]]) -> None:
    totals = reading.totals
    totals.check()
    if totals.rejects and not totals.records.total() and not totals.skipped.total():
        ((reason, rows),) = totals.rejects.most_common(1)
        row = examples[reason][0]
        raise SourceError(
            f"{log.path} was taken for {reading.format}, and none of its {totals.rows:,} rows could"
            f" be read; of {rows:,}: {reason} (line {row.line}: {row.text[:100]!r}). Nothing was"
            " changed; name its format with --as"
        )
    size = log.path.stat().st_size if log.path.is_file() else log.size_bytes
    if size != log.size_bytes:
        raise SourceError(f"{log.path} changed while it was read; the lake is unchanged; try again")


def _refuse_other_names(writer: LakeWriter, names: Pseudonyms | None) -> None:
    has = writer.manifest
    if has.sources and has.anonymous != (names.mark if names else ""):
        how = "names that another key replaced" if has.anonymous else "names as they are"
        raise UsageError(
            f"{writer.path} has {how}; nothing was changed. Read these logs into a lake of their"
            " own" + (", or give its key with --anonymize" if has.anonymous else "")
        )
