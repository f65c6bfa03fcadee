"""The lake: records of a cluster on disk by kind and day, merged without duplicates (fleet.md).

`lake.json` names every file of the lake and is renamed into place after all of them are written.
Other files are leftovers and are ignored.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import polars as pl

from outlast.errors import LakeError
from outlast.fleet.part_damage import find_defect
from outlast.fleet.record_tables import KIND_OF, Name, Tables, schema

VERSION = 1
MANIFEST = "lake.json"
UNFINISHED = ("RUNNING", "SUSPENDED")  # their end is in a later log

Day = Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d\d-\d\d$")]
Moment = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Identity = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}$")]


class LakePart(msgspec.Struct, frozen=True, kw_only=True):
    """File with the records of one kind and day.

    `last_ns`: latest time in a record, including the ends of outages. `digest`: `file_digest`.
    """

    kind: Name
    day: Day
    id: Identity
    rows: int
    digest: str = ""  # older versions wrote none
    first_ns: Moment
    last_ns: Moment
    unfinished: int = 0  # jobs in a state of UNFINISHED, outages without an end

    @property
    def file(self) -> str:
        """Path of the file in the lake."""
        return f"{self.kind}/day={self.day}/{self.id}.parquet"


class LakeSource(msgspec.Struct, frozen=True, kw_only=True):
    """A log that was read.

    Each of its rows is a record, or one of `skipped` or `rejects`; a row of several records (a
    fault is an outage and a finding) counts for each in `records`.
    """

    id: Identity
    name: str
    format: str
    digest: str
    size_bytes: int
    read_ns: int
    rows: int
    records: dict[Name, int]
    skipped: dict[str, int]  # rows that hold no record, by kind
    rejects: dict[str, int]  # rows that could not be read, by reason: rejects/ID.jsonl has them
    since_ns: int | None  # of its records; None: it has none
    until_ns: int | None
    odd: dict[str, int] = {}  # records kept despite this anomaly
    notes: tuple[str, ...] = ()
    options: dict[str, str] | None = None  # digests by flag; None: read by an older version


class LakeManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a lake."""

    version: int = VERSION
    anonymous: str = ""  # mark of the key of the pseudonyms; "": original names
    sources: tuple[LakeSource, ...] = ()
    parts: tuple[LakePart, ...] = ()


class Lake:
    """A lake, as of the time it was opened."""

    def __init__(self, path: Path, manifest: LakeManifest) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: Path) -> Lake:
        """Open a lake. Raises LakeError if it is none, is empty, or cannot be read."""
        manifest = read_manifest(path)
        if manifest is None:
            raise LakeError(
                f"{path} is no lake: it has no {MANIFEST}; `outlast fleet ingest {path} LOGS`"
                " makes one"
            )
        lake = cls(path, manifest)
        if not manifest.parts:
            raise LakeError(
                f"{path} holds no records yet; `outlast fleet ingest` reads logs into it"
            )
        refuse_damage(path, manifest.parts)
        return lake

    @property
    def since_ns(self) -> int:
        """First time in a record."""
        return min(part.first_ns for part in self.manifest.parts)

    @property
    def until_ns(self) -> int:
        """Just after the last time in a record."""
        return max(part.last_ns for part in self.manifest.parts) + 1

    def tables(self, since_ns: int | None = None, until_ns: int | None = None) -> Tables:
        """Return the records from `since_ns` up to, not including, `until_ns`; by default all.

        Jobs, findings and repairs with `t_ns` in the window, outages that overlap it, nodes and
        checks known before its end. Only days that can have such records are read. Raises LakeError
        for a window that is empty or outside of the lake.
        """
        since = self.since_ns if since_ns is None else since_ns
        until = self.until_ns if until_ns is None else until_ns
        if since >= until:
            raise LakeError(
                f"from {format_time(since)} until {format_time(until)} is an empty period"
            )
        if until <= self.since_ns or since >= self.until_ns:
            raise LakeError(
                f"{self.path} has nothing from {format_time(since)} until {format_time(until)}:"
                " its records are"
                f" from {format_time(self.since_ns)} until {format_time(self.until_ns)}"
            )
        frames = {kind: self._frame(kind, since, until) for kind in KIND_OF}
        return Tables(**frames, since_ns=since, until_ns=until)

    def _frame(self, kind: Name, since_ns: int, until_ns: int) -> pl.LazyFrame:
        from_before = kind in ("outages", "nodes", "checks")
        parts = [
            part
            for part in self.manifest.parts
            if part.kind == kind
            and part.first_ns < until_ns
            and (part.last_ns >= since_ns or part.unfinished or kind in ("nodes", "checks"))
        ]
        frame = scan(self.path, parts, kind)
        if any(part.last_ns >= until_ns for part in parts):
            frame = frame.filter(pl.col("t_ns") < until_ns)
        if not from_before and any(part.first_ns < since_ns for part in parts):
            frame = frame.filter(pl.col("t_ns") >= since_ns)
        if kind == "outages":
            frame = frame.filter(pl.col("until_ns").is_null() | (pl.col("until_ns") > since_ns))
        return renumber_attempts(frame) if kind == "jobs" else frame


def renumber_attempts(jobs: pl.LazyFrame) -> pl.LazyFrame:
    """Renumber `attempt`: a source with a single attempt numbers it as the first."""
    job = pl.struct("cluster", "job", began=pl.coalesce("start_ns", "submit_ns", "t_ns"))
    return jobs.with_columns(attempt=job.map_batches(_attempt_numbers, return_dtype=pl.Int64))


def _attempt_numbers(jobs: pl.Series) -> pl.Series:
    """Number attempts by start. Only jobs with several attempts are sorted."""
    key = pl.struct("cluster", "job").hash()
    every = jobs.struct.unnest().select(key.alias("key"), "began").with_row_index("at")
    several = every.filter(pl.col("key").is_duplicated()).sort("key", "began", "at")
    place = pl.int_range(pl.len())
    first = pl.when(pl.col("key") != pl.col("key").shift()).then(place).forward_fill().fill_null(0)
    found = several.select("at", attempt=place - first)
    return pl.zeros(len(jobs), pl.Int64, eager=True).scatter(found["at"], found["attempt"])


def scan(path: Path, parts: Iterable[LakePart], kind: Name) -> pl.LazyFrame:
    """Return the records of some parts of one kind."""
    files = [path / part.file for part in parts]
    wanted = schema(KIND_OF[kind])
    if not files:
        return pl.LazyFrame(schema=wanted)
    return pl.scan_parquet(files, schema=wanted, hive_partitioning=False, glob=False)


def refuse_damage(path: Path, parts: Iterable[LakePart]) -> None:
    """Refuse files that are missing or damaged, the first by name. Raises LakeError."""
    for part in parts:
        if wrong := find_defect(path / part.file, part.digest, part.rows):
            raise LakeError(
                f"{path / part.file} is {wrong}, which {MANIFEST} names: restore it, or read the"
                " logs again into a new lake"
            )


def read_manifest(path: Path) -> LakeManifest | None:
    """Return the manifest; None if there is none. Raises LakeError."""
    file = path / MANIFEST
    try:
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise LakeError(f"{file} cannot be read: {error.strerror}") from error
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version > VERSION:
            raise LakeError(
                f"{path} is a lake of version {version}, and this Outlast reads version {VERSION}:"
                " nothing was touched; use the Outlast that wrote it, or a newer one"
            )
        return msgspec.json.decode(data, type=LakeManifest)
    except msgspec.DecodeError as error:
        raise LakeError(f"{file} is damaged or no lake's: {error}") from error


def format_time(t_ns: int) -> str:
    """Return a time as text, to the second, in UTC."""
    when = dt.datetime.fromtimestamp(t_ns // 10**9, tz=dt.UTC)
    return when.strftime("%Y-%m-%d %H:%M:%S UTC")


def day_of(day: int) -> str:
    """Return the name of a day, counted from 1970."""
    return (dt.date(1970, 1, 1) + dt.timedelta(days=day)).isoformat()


def day_number(name: str) -> int:
    """Return a day's number from 1970 on by its name."""
    return (dt.date.fromisoformat(name) - dt.date(1970, 1, 1)).days


class _Versioned(msgspec.Struct, frozen=True):
    version: int


_ATTEMPT = ("cluster", "job", "_began", "_held")
_OUTAGE = ("cluster", "node", "t_ns", "symptom", "detail")


class StaleRecords(NamedTuple):
    """Records of unfinished jobs for which better ones exist now.

    By the key of the attempt and `t_ns`; and the days of the lake that have some.
    """

    rows: pl.DataFrame
    days: tuple[str, ...]


class MergeCounts(NamedTuple):
    """Number of staged records, of those already known, and of replaced ones."""

    records: int
    again: int
    replaced: int


def find_stale(
    path: Path, kind: Name, parts: list[LakePart], staged: dict[str, list[Path]]
) -> StaleRecords:
    """Return the records of unfinished attempts that other records supersede.

    An attempt is a cluster's job that began (or, if it never did, was submitted) at one time. A
    finished record supersedes an unfinished one, and of those the latest wins.
    """
    none = pl.DataFrame(
        schema={
            "cluster": pl.String,
            "job": pl.String,
            "_began": pl.Int64,
            "_held": pl.Boolean,
            "t_ns": pl.Int64,
        }
    )
    if kind != "jobs":
        return StaleRecords(none, ())
    every = [file for files in staged.values() for file in files]
    running = [part for part in parts if part.unfinished]
    open_ = pl.concat([_attempts(_read(kind, every)), _attempts(scan(path, running, kind))]).filter(
        pl.col("state").is_in(UNFINISHED)
    )
    unfinished = open_.select(none.columns).unique().collect(engine="streaming")
    if not unfinished.height:
        return StaleRecords(none, ())
    keys = unfinished.select(_ATTEMPT).unique().lazy()
    ended = [
        _attempts(frame)
        .filter(~pl.col("state").is_in(UNFINISHED))
        .select(_ATTEMPT)
        .join(keys, on=_ATTEMPT, how="semi", nulls_equal=True)
        for frame in (_read(kind, every), scan(path, parts, kind))
    ]
    finished = pl.concat(ended).unique().collect(engine="streaming").with_columns(_done=True)
    latest = pl.col("t_ns") == pl.col("t_ns").max().over(_ATTEMPT)
    dead = unfinished.join(finished, on=_ATTEMPT, how="left", nulls_equal=True).filter(
        pl.col("_done").is_not_null() | ~latest
    )
    return StaleRecords(dead.select(none.columns), _days(path, running, dead))


def merge_partition(
    path: Path, kind: Name, had: LakePart | None, staged: Iterable[Path], stale: StaleRecords
) -> tuple[pl.DataFrame, MergeCounts]:
    """Return a day's records, by time, and the counts of the `staged` ones."""
    old = scan(path, [had] if had else [], kind).collect()
    new = _read(kind, staged).collect()
    both = pl.concat([old.with_columns(_new=False), new.with_columns(_new=True)])
    merged = both
    if kind == "jobs":
        merged = _drop_stale(both, stale.rows)
        replaced = old.height - merged.filter(~pl.col("_new")).height
        keyed = _attempts(merged.lazy()).collect()
        merged = keyed.unique([*_ATTEMPT], keep="last", maintain_order=True)
        merged = merged.drop("_began", "_held")
    elif kind == "outages":
        # An ended outage supersedes an open one.
        order = both.sort(pl.col("until_ns").is_null(), maintain_order=True)
        merged = order.unique(_OUTAGE, keep="first", maintain_order=True)
        replaced = _count_open(old) - _count_open(merged.filter(~pl.col("_new")))
    else:
        merged = both.unique(list(schema(KIND_OF[kind])), keep="first", maintain_order=True)
        replaced = 0
    counted = MergeCounts(new.height, both.height - merged.height - replaced, replaced)
    return merged.drop("_new").sort("t_ns", maintain_order=True), counted


def describe_part(kind: Name, day: str, identity: str, digest: str, rows: pl.DataFrame) -> LakePart:
    """Return the manifest entry of a file."""
    last = rows["t_ns"].max()
    unfinished = 0
    if kind == "jobs":
        unfinished = rows.filter(pl.col("state").is_in(UNFINISHED)).height
    if kind == "outages":
        unfinished = rows["until_ns"].null_count()
        last = rows.select(pl.max_horizontal("t_ns", "until_ns").max()).item()
    return LakePart(
        kind=kind,
        day=day,
        id=identity,
        rows=rows.height,
        digest=digest,
        unfinished=unfinished,
        first_ns=rows.select(pl.col("t_ns").min()).item(),
        last_ns=int(str(last)),
    )


def _attempts(jobs: pl.LazyFrame) -> pl.LazyFrame:
    """Add the key of an attempt."""
    return jobs.with_columns(
        _began=pl.coalesce("start_ns", "submit_ns", "t_ns"), _held=pl.col("start_ns").is_not_null()
    )


def _drop_stale(jobs: pl.DataFrame, stale: pl.DataFrame) -> pl.DataFrame:
    if not stale.height:
        return jobs
    marked = stale.with_columns(_gone=True)
    found = _attempts(jobs.lazy()).join(
        marked.lazy(), on=[*_ATTEMPT, "t_ns"], how="left", nulls_equal=True, maintain_order="left"
    )
    current = found.filter(pl.col("_gone").is_null() | ~pl.col("state").is_in(UNFINISHED))
    return current.drop("_began", "_held", "_gone").collect()


def _count_open(outages: pl.DataFrame) -> int:
    return outages["until_ns"].null_count()


def _days(path: Path, running: list[LakePart], dead: pl.DataFrame) -> tuple[str, ...]:
    """Return the days of the parts that have stale records."""
    return tuple(
        part.day
        for part in running
        if _attempts(scan(path, [part], "jobs"))
        .filter(pl.col("state").is_in(UNFINISHED))
        .join(dead.lazy(), on=[*_ATTEMPT, "t_ns"], how="semi", nulls_equal=True)
        .head(1)
        .collect()
        .height
    )


def _read(kind: Name, files: Iterable[Path]) -> pl.LazyFrame:
    found = list(files)
    return pl.scan_ipc(found) if found else pl.LazyFrame(schema=schema(KIND_OF[kind]))
