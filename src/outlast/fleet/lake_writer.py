"""The writer of a lake: records are staged by kind and day and committed at once."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import polars as pl

from outlast.atomic_files import sync
from outlast.errors import LakeError, StorageError, UsageError
from outlast.fleet import host_lists, lake
from outlast.fleet.formats.log_reading import Reject
from outlast.fleet.lake import (
    MANIFEST,
    LakeManifest,
    LakePart,
    LakeSource,
    day_number,
    day_of,
    read_manifest,
    refuse_damage,
    scan,
)
from outlast.fleet.lake_selection import LONGEST_DAYS
from outlast.fleet.part_damage import file_digest
from outlast.fleet.record_tables import DAY_NS, KIND_OF, Name

JOB_COLUMNS = ("cluster", "hosts", "nodes", "gpus", "start_ns", "t_ns")
SLACK_NS = 60 * 10**9  # tolerated overlap of jobs on a node: cleaning up, and rounding


class DoubleBooking(NamedTuple):
    """Node whose jobs had more GPUs at `t_ns` than any job had of a node of its cluster."""

    cluster: str
    node: str
    t_ns: int
    gpus: int
    most: int


class DoubleBookingDetector:
    """Detector over days of jobs, given from the last to the first.

    A job that ended later may have held a node on an earlier day. Keeps the jobs that ran at one
    midnight, up to LONGEST_DAYS each.
    """

    def __init__(self) -> None:
        self._later: pl.DataFrame | None = None
        self._found: dict[tuple[str, str], DoubleBooking] = {}

    def add(self, jobs: pl.DataFrame, since_ns: int) -> None:
        """Add the jobs that ended on the day that begins at `since_ns`."""
        current = jobs.select(JOB_COLUMNS)
        if self._later is not None:
            current = pl.concat([current, self._later])
        for booking in find_double_bookings(current):
            known = self._found.get((booking.cluster, booking.node))
            if known is None or booking.t_ns < known.t_ns:
                self._found[booking.cluster, booking.node] = booking
        begun = pl.col("start_ns")
        still = (begun < since_ns) & (begun > pl.col("t_ns") - LONGEST_DAYS * DAY_NS)
        self._later = current.filter(still)

    def reaches(self, until_ns: int) -> bool:
        """Return whether an added job ran before that time."""
        return self._later is not None and bool((self._later["start_ns"] < until_ns).any())

    def found(self) -> list[DoubleBooking]:
        """Return each double-booked node, with its first time."""
        return sorted(self._found.values(), key=lambda booking: (booking.t_ns, booking.node))


def find_double_bookings(jobs: pl.DataFrame) -> list[DoubleBooking]:
    """Return each double-booked node of these jobs, with its first time.

    A node's capacity is the most GPUs that a job had of a node. Jobs with unequal shares of their
    nodes are ignored, and so are invalid host lists.
    """
    running = jobs.lazy().filter(
        pl.col("start_ns").is_not_null(),
        pl.col("start_ns") + SLACK_NS < pl.col("t_ns"),
        pl.col("gpus") > 0,
        pl.col("nodes") > 0,
        pl.col("gpus") % pl.col("nodes") == 0,
    )
    try:
        each = host_lists.explode_hosts(
            running.with_columns(each=pl.col("gpus") // pl.col("nodes"))
        ).select("cluster", "node", "each", "start_ns", until=pl.col("t_ns") - SLACK_NS)
        begun = each.select("cluster", "node", "each", t_ns="start_ns", change="each")
        ended = each.select("cluster", "node", "each", t_ns="until", change=-pl.col("each"))
        # An end comes before a start at the same time.
        steps = pl.concat([begun, ended]).sort("t_ns", "change")
        where = ("cluster", "node")
        most = pl.col("each").max().over("cluster")
        at_once = pl.col("change").cum_sum().over(where)
        found = (
            steps.with_columns(most=most, at_once=at_once)
            .filter(pl.col("at_once") > pl.col("most"))
            .group_by(where, maintain_order=True)
            .first()
            .select("cluster", "node", "t_ns", "at_once", "most")
            .sort("t_ns", "node")
            .collect()
        )
    except UsageError:
        return []
    return [DoubleBooking(*row) for row in found.iter_rows()]


READING = ".reading"
LOCK = ".lock"
REJECTS = "rejects"
WAIT_S = 5.0
_POLL_S = 0.1
_SYNCS = 16
_BUFFERED_ROWS_MAX = 125_000  # of one kind, before they go to disk
_OURS = re.compile(r"[0-9a-f]{16}\.(parquet|jsonl)")


class AddedRecords(NamedTuple):
    """Counts of the added records of one kind.

    `again`: already in the lake. `replaced`: less complete records of the lake that were replaced.
    """

    records: int
    again: int
    replaced: int


class LakeWriter:
    """One ingestion into a lake; see `open_writer`."""

    def __init__(self, path: Path, manifest: LakeManifest) -> None:
        self.path = path
        self.manifest = manifest
        self._buffered: dict[Name, list[pl.DataFrame]] = {}
        self._buffered_rows: dict[Name, int] = {}
        self._staged: dict[Name, dict[int, list[Path]]] = {kind: {} for kind in KIND_OF}
        self._files = 0
        self._unsynced: set[Path] = set()
        self.doubles: list[
            DoubleBooking
        ] = []  # among jobs of the days that were merged, and before

    def add(self, kind: Name, records: pl.DataFrame) -> None:
        """Add records with the columns of their kind. Raises StorageError."""
        self._buffered.setdefault(kind, []).append(records)
        self._buffered_rows[kind] = self._buffered_rows.get(kind, 0) + records.height
        if self._buffered_rows[kind] >= _BUFFERED_ROWS_MAX:
            with _storage_errors(self.path):
                self._stage(kind)

    def reject(self, identity: str, rows: list[Reject]) -> None:
        """Add rejects of the source with this identity, one JSON object a line. Raises
        StorageError."""
        if rows:
            with _storage_errors(self.path), self._rejects(identity).open("ab") as out:
                out.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))

    def commit(self, sources: list[LakeSource], anonymous: str) -> dict[Name, AddedRecords]:
        """Commit all added records atomically. Raises StorageError."""
        with _storage_errors(self.path):
            return self._commit(sources, anonymous)

    def _commit(self, sources: list[LakeSource], anonymous: str) -> dict[Name, AddedRecords]:
        for kind in list(self._buffered):
            self._stage(kind)
        parts = list(self.manifest.parts)
        added = {}
        for kind in KIND_OF:
            if self._staged[kind]:
                parts, added[kind] = self._merge_days(kind, parts)
        self._place_rejects(sources)
        parts.sort(key=lambda part: (part.kind, part.day))
        manifest = LakeManifest(
            anonymous=anonymous, sources=(*self.manifest.sources, *sources), parts=tuple(parts)
        )
        with ThreadPoolExecutor(_SYNCS) as pool:  # a file system writes many as fast as one
            list(pool.map(sync, self._unsynced))
        self._publish(manifest)
        self.manifest = manifest
        remove_leftovers(self.path, manifest)
        return added

    def _stage(self, kind: Name) -> None:
        frame = pl.concat(self._buffered.pop(kind))
        self._buffered_rows[kind] = 0
        by_day = frame.with_columns(_day=pl.col("t_ns") // DAY_NS).partition_by(
            "_day", as_dict=True, include_key=False
        )
        for (day,), rows in by_day.items():
            self._files += 1
            file = self.path / READING / f"{kind}-{self._files}.arrow"
            rows.write_ipc(file, compression="lz4")
            self._staged[kind].setdefault(int(str(day)), []).append(file)

    def _merge_days(self, kind: Name, parts: list[LakePart]) -> tuple[list[LakePart], AddedRecords]:
        """Return the merged parts of all kinds, with the files of `kind` in place."""
        staged = {day_of(day): files for day, files in self._staged[kind].items()}
        old = {part.day: part for part in parts if part.kind == kind}
        stale = lake.find_stale(self.path, kind, list(old.values()), staged)
        touched = sorted({*staged, *stale.days})
        records = again = replaced = 0
        detector = DoubleBookingDetector()
        for day in sorted({*touched, *old}, reverse=True) if kind == "jobs" else touched:
            begin_ns = day_number(day) * DAY_NS
            if day not in touched:
                if detector.reaches(begin_ns + DAY_NS):
                    detector.add(
                        scan(self.path, [old[day]], kind).select(JOB_COLUMNS).collect(), begin_ns
                    )
                continue
            had = old.pop(day, None)
            frame, counted = lake.merge_partition(self.path, kind, had, staged.get(day, []), stale)
            records += counted.records
            again += counted.again
            replaced += counted.replaced
            if kind == "jobs":
                detector.add(frame, begin_ns)
            if frame.height:
                old[day] = self._write(kind, day, frame)
        self.doubles += detector.found()
        other_parts = [part for part in parts if part.kind != kind]
        return [*other_parts, *old.values()], AddedRecords(records, again, replaced)

    def _write(self, kind: Name, day: str, frame: pl.DataFrame) -> LakePart:
        identity = secrets.token_hex(8)
        draft = self.path / READING / f"{identity}.parquet"
        frame.write_parquet(draft, compression="zstd", compression_level=3)
        part = lake.describe_part(kind, day, identity, file_digest(draft), frame)
        target = self.path / part.file
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.rename(target)
        self._unsynced |= {target, target.parent, target.parent.parent}
        return part

    def _place_rejects(self, sources: list[LakeSource]) -> None:
        for source in sources:
            draft = self._rejects(source.id)
            if draft.exists():
                target = self.path / REJECTS / draft.name
                target.parent.mkdir(exist_ok=True)
                draft.rename(target)
                self._unsynced |= {target, target.parent}

    def _rejects(self, identity: str) -> Path:
        return self.path / READING / f"{identity}.jsonl"

    def _publish(self, manifest: LakeManifest) -> None:
        draft = self.path / READING / MANIFEST
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        sync(draft)
        draft.rename(self.path / MANIFEST)
        sync(self.path)


@contextmanager
def open_writer(path: Path, wait_s: float = WAIT_S) -> Iterator[LakeWriter]:
    """Open the exclusive writer of a lake, which is created if missing.

    Uncommitted records are dropped at the end. Raises UsageError for another kind of directory,
    LakeError if another writer holds the lock for longer than `wait_s` or the lake cannot be read,
    StorageError.
    """
    is_new = not path.exists()
    if not is_new and not path.is_dir():
        raise UsageError(
            f"{path} is a file, and a lake is a directory: `outlast fleet ingest LAKE LOG...`;"
            " nothing was written"
        )
    with _storage_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        _refuse_strange(path)
        _refuse_links(path)
        lock = _lock(path, wait_s)
    try:
        with _storage_errors(path):
            manifest = read_manifest(path) or LakeManifest()
            refuse_damage(path, manifest.parts)
            remove_leftovers(path, manifest)
            (path / READING).mkdir()
        try:
            yield LakeWriter(path, manifest)
        finally:
            shutil.rmtree(path / READING, ignore_errors=True)
            _restore_directory(path, is_new=is_new)
    finally:
        os.close(lock)


def remove_leftovers(path: Path, manifest: LakeManifest) -> None:
    """Remove the files of an interrupted writer, and replaced files."""
    shutil.rmtree(path / READING, ignore_errors=True)
    named = {part.file for part in manifest.parts}
    named |= {f"{REJECTS}/{source.id}.jsonl" for source in manifest.sources}
    for pattern in (*(f"{kind}/day=*/*.parquet" for kind in KIND_OF), f"{REJECTS}/*.jsonl"):
        for file in path.glob(pattern):
            if str(file.relative_to(path)) not in named and _OURS.fullmatch(file.name):
                file.unlink(missing_ok=True)
                with suppress(OSError):  # not empty
                    file.parent.rmdir()


def _restore_directory(path: Path, *, is_new: bool) -> None:
    """Restore a directory in which nothing was committed."""
    if not (path / MANIFEST).exists():
        remove_leftovers(path, LakeManifest())
        for kind in (*KIND_OF, REJECTS):
            with suppress(OSError):
                (path / kind).rmdir()
        with suppress(OSError):
            (path / LOCK).unlink(missing_ok=True)
            if is_new:
                path.rmdir()


def _refuse_strange(path: Path) -> None:
    ours = {MANIFEST, READING, LOCK, REJECTS, *KIND_OF}
    names = {file.name for file in path.iterdir()}
    if MANIFEST not in names and not names <= ours:
        strange = min(names - ours)
        raise UsageError(
            f"{path} is no lake and not empty (it has {strange}); nothing was written: name a new"
            " directory, or one that `outlast fleet ingest` made"
        )


def _refuse_links(path: Path) -> None:
    """Refuse symbolic links: all writes must stay in the lake. Raises LakeError."""
    folders = (REJECTS, *KIND_OF, *(f"{kind}/day=*" for kind in KIND_OF))
    for folder in (each for pattern in folders for each in path.glob(pattern)):
        if folder.is_symlink():
            raise LakeError(
                f"{folder} is a link, and nothing is written outside of a lake: replace it by"
                " the folder; nothing was changed"
            )


def _lock(path: Path, wait_s: float) -> int:
    """Return the locked file; it must still be the one at this path. Raises LakeError."""
    deadline = time.monotonic() + wait_s
    while True:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), (path / LOCK).stat()):
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
                return lock
            os.close(lock)
        except (BlockingIOError, FileNotFoundError):
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            if time.monotonic() > deadline:
                raise LakeError(
                    f"{path} is being written by another `outlast fleet ingest` (pid {holder});"
                    " nothing was changed; try again when it has ended"
                ) from None
            time.sleep(_POLL_S)  # flock has no deadline of its own


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pl.exceptions.ComputeError) as error:
        what = (isinstance(error, OSError) and error.strerror) or str(error)  # polars' have none
        raise StorageError(f"{path} cannot be written: {what}; it is unchanged") from error
