"""Append-only segment files, the primary records on disk; `docs/format.md` specifies them.

A segment is `OLSG | u32 version` and then records of `u32 length | u64 xxh3_64(payload) | payload`,
all little endian. Each file has one writer and is never opened for writing again, so that readers
need no lock and a writer killed in the middle of a record leaves only a torn tail.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from outlast.errors import RunDirError, UsageError

MAGIC = b"OLSG"
VERSION = 1
HEADER = struct.Struct("<4sI")
RECORD = struct.Struct("<IQ")
SEGMENT_BYTES = 64 << 20
RECORD_BYTES_MAX = 128 << 20
BLOCK_RECORDS = 1 << 15
SUFFIX = ".seg"
_WRITER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_NAME = re.compile(rf"(?P<writer>.+)\.(?P<index>\d{{6,}})\{SUFFIX}")
_NAMES_TRIED_MAX = 100
_SEARCH_BYTES_MAX = 4 << 20  # search range for a complete record after damage
_DIGEST_BYTES_MAX = 1 << 30  # bytes that a search may digest for false lengths


class SegmentRecord(NamedTuple):
    """One complete record and its position. `offset` is that of its length field."""

    writer: str
    path: Path
    offset: int
    payload: bytes


class SegmentBlock(NamedTuple):
    """Consecutive complete records in `data`, whose first byte is at `base` in the file.

    `begins`, `ends`: places of their payloads in `data`.
    """

    data: bytes
    base: int
    begins: array[int]
    ends: array[int]


class SegmentDamage(NamedTuple):
    """Damaged bytes of a segment: `skipped_bytes` from `offset` on were skipped."""

    path: Path
    offset: int
    skipped_bytes: int
    what: str

    def __str__(self) -> str:
        if not self.skipped_bytes:
            return f"{self.path} was skipped from byte {self.offset} on: {self.what}"
        return (
            f"{self.path} is damaged at byte {self.offset}: {self.what};"
            f" {self.skipped_bytes} bytes were skipped, everything else was read"
        )


class SegmentWriter:
    """Writer of records to `directory/WRITER.INDEX.seg`; one process writes under one name.

    `append` is atomic for readers: they read a complete record or none. With `durable` it returns
    only when the record is on the disk (file and, after a rotation, directory synced). It raises
    OSError when the disk refuses; then no part of the record is kept, and the call may be repeated.
    """

    def __init__(
        self,
        directory: Path,
        writer: str,
        durable: bool = False,
        *,
        rotate_bytes: int = SEGMENT_BYTES,
    ) -> None:
        if not _WRITER.fullmatch(writer):
            raise UsageError(f"{writer!r} cannot name a segment writer: use letters, digits, . _ -")
        self.directory = directory
        self.writer = writer
        self.durable = durable
        self.rotate_bytes = rotate_bytes
        self._fd = -1
        self._size_bytes = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirError(
                f"cannot make {directory}: {error.strerror}; nothing was written there;"
                " choose another run directory"
            ) from error

    def append(self, payload: bytes) -> None:
        """Append one record; start a new segment when this one is full.

        Raises UsageError for an empty or too large payload, OSError where it cannot be written.
        """
        self.append_all((payload,))

    def append_all(self, payloads: Iterable[bytes]) -> None:
        """Append records, with one sync for all of them; raises as `append`, and may then have kept
        some of the first ones."""
        for payload in payloads:
            if not 0 < len(payload) <= RECORD_BYTES_MAX:
                raise UsageError(
                    f"a record holds 1 to {RECORD_BYTES_MAX} bytes, not {len(payload)}; not written"
                )
            if self._fd < 0 or self._size_bytes >= self.rotate_bytes:
                self._sync()
                self._rotate()
            self._write(pack_record(payload))
        self._sync()

    def _sync(self) -> None:
        if self.durable and self._fd >= 0:
            os.fdatasync(self._fd)

    def close(self) -> None:
        """End the segment. A second call does nothing; a later append starts a new one."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _rotate(self) -> None:
        self.close()
        indices = [index for writer, index, _ in _listing(self.directory) if writer == self.writer]
        path = self._create(max(indices, default=-1) + 1)
        self._size_bytes = 0
        try:
            self._write(segment_header())
            if self.durable:
                _sync_directory(self.directory)
        except OSError:
            self.close()
            path.unlink(missing_ok=True)
            raise

    def _create(self, first: int) -> Path:
        """Create a new file; a file that another process wrote under this name is kept."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        for index in range(first, first + _NAMES_TRIED_MAX):
            path = self.directory / f"{self.writer}.{index:06d}{SUFFIX}"
            try:
                self._fd = os.open(path, flags, 0o644)
            except FileExistsError:
                continue  # another process took this index meanwhile
            return path
        raise FileExistsError(f"{self.directory}: no free segment name for {self.writer!r}")

    def _write(self, data: bytes) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError:
            self._take_back()
            raise
        self._size_bytes += len(data)

    def _take_back(self) -> None:
        """Cut off an incomplete record; if that fails, leave the segment with its torn tail."""
        try:
            os.ftruncate(self._fd, self._size_bytes)
        except OSError:
            self.close()


def pack_record(payload: bytes) -> bytes:
    """Return a payload as a record of a segment."""
    return RECORD.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload


def segment_header() -> bytes:
    """Return the first bytes of a segment."""
    return HEADER.pack(MAGIC, VERSION)


class SegmentReader:
    """Reader of one segment from its last position, during the writing or after."""

    def __init__(self, path: Path, *, is_strict: bool = False) -> None:
        """`is_strict`: `read` raises OSError for a file that cannot be read."""
        name = _NAME.fullmatch(path.name)
        self.path, self._is_strict = path, is_strict
        self.writer = name["writer"] if name else path.stem
        self.offset = 0
        self._seen_bytes = -1
        self._is_refused = False

    def read(
        self, damaged: Callable[[SegmentDamage], None], *, last: bool
    ) -> Iterator[SegmentRecord]:
        """Yield complete records since the previous call, as `read_blocks` finds them."""
        for block in self.read_blocks(damaged, last=last):
            for begin, end in zip(block.begins, block.ends, strict=True):
                offset = block.base + begin - RECORD.size
                yield SegmentRecord(self.writer, self.path, offset, block.data[begin:end])

    def read_blocks(
        self, damaged: Callable[[SegmentDamage], None], *, last: bool
    ) -> Iterator[SegmentBlock]:
        """Yield complete records since the previous call, in blocks.

        A torn tail ends it silently: the next call tries again. `last`: no more will be written, so
        that a complete record with a wrong digest at the very end counts as damage. A path that is
        no file, or that cannot be read, is damage once.
        """
        try:
            data = self._new_bytes(last)
        except OSError as error:
            if self._is_strict:
                raise
            if not self._is_refused:
                self._is_refused = True
                what = f"it cannot be read: {error.strerror}"
                damaged(SegmentDamage(self.path, self.offset, 0, what))
            return
        self._is_refused = False
        if not data or (self.offset == 0 and not self._open(data, damaged)):
            return
        base = self.offset
        at = HEADER.size if base == 0 else 0
        while len(data) - at >= RECORD.size:
            block = _whole_records(data, at, base)
            if block.ends:
                at = block.ends[-1]
                self.offset = base + at
                yield block
                continue
            end = _next_whole(data, at)
            length = RECORD.unpack_from(data, at)[0]
            complete = at + RECORD.size + length <= len(data)
            if not end and not (last and complete):
                return
            end = end or len(data)
            self.offset = base + end
            damaged(SegmentDamage(self.path, base + at, end - at, "a record's digest is wrong"))
            at = end

    def _new_bytes(self, last: bool) -> bytes:
        """Return the bytes since the last position. Raises OSError."""
        status = self.path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would stop the reader
            raise OSError(errno.EINVAL, "no regular file")
        if status.st_size == self._seen_bytes and not last:
            return b""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        self._seen_bytes = status.st_size
        return data

    def _open(self, data: bytes, damaged: Callable[[SegmentDamage], None]) -> bool:
        """Return whether records of our version follow; an incomplete header may still grow."""
        if len(data) < HEADER.size:
            return False
        magic, version = HEADER.unpack_from(data)
        if magic == MAGIC and version == VERSION:
            return True
        what = (
            f"version {version}, this Outlast reads {VERSION}" if magic == MAGIC else "no segment"
        )
        damaged(SegmentDamage(self.path, 0, len(data), what))
        self.offset = len(data)
        return False


def read_records(
    where: Path, damaged: Callable[[SegmentDamage], None] | None = None
) -> Iterator[SegmentRecord]:
    """Yield every complete record of a segment file or directory, by writer and then in order.

    Damage is handed to `damaged` (default: a RuntimeWarning each) and skipped; an exception raised
    there ends the reading. A directory that does not exist holds no records. Raises OSError when
    it cannot be listed, or a file of it cannot be read.
    """
    for path in segment_paths(where) if where.is_dir() else [where] if where.exists() else []:
        yield from SegmentReader(path, is_strict=True).read(damaged or _warn, last=True)


def segment_paths(directory: Path) -> list[Path]:
    """Return the segments of a directory, by writer and then by age."""
    return [path for _, _, path in sorted(_listing(directory))]


def _listing(directory: Path) -> Iterator[tuple[str, int, Path]]:
    for path in directory.iterdir():
        name = _NAME.fullmatch(path.name)
        if name:
            yield name["writer"], int(name["index"]), path


def _warn(damage: SegmentDamage) -> None:
    warnings.warn(str(damage), RuntimeWarning, stacklevel=3)


def _whole_records(data: bytes, at: int, base: int) -> SegmentBlock:
    """Return the complete records from `at` on, at most BLOCK_RECORDS."""
    begins, ends = array("q"), array("q")
    unpack, digest_of = RECORD.unpack_from, xxhash.xxh3_64_intdigest
    head, size = RECORD.size, len(data)
    view = memoryview(data)
    for _ in range(BLOCK_RECORDS):
        begin = at + head
        if begin > size:
            break
        length, digest = unpack(data, at)
        at = begin + length
        if not 0 < length <= RECORD_BYTES_MAX or at > size or digest_of(view[begin:at]) != digest:
            break
        begins.append(begin)
        ends.append(at)
    return SegmentBlock(data, base, begins, ends)


def _record_end(data: bytes, at: int) -> int:
    """Return the offset behind the complete record at `at`, or 0 if there is none."""
    length, digest = RECORD.unpack_from(data, at)
    end = at + RECORD.size + length
    if not 0 < length <= RECORD_BYTES_MAX or end > len(data):
        return 0
    body = memoryview(data)[at + RECORD.size : end]
    return end if xxhash.xxh3_64_intdigest(body) == digest else 0


def _next_whole(data: bytes, damaged_at: int) -> int:
    """Return the offset of the next complete record behind damage, or 0.

    The damaged record's own length is tried first; a damaged length makes a search necessary,
    which is bounded in both the bytes that it walks and the bytes that it digests.
    """
    final = len(data) - RECORD.size
    stated = damaged_at + RECORD.size + RECORD.unpack_from(data, damaged_at)[0]
    if stated <= final and _record_end(data, stated):
        return stated
    budget_bytes = _DIGEST_BYTES_MAX
    for at in range(damaged_at + 1, min(final, damaged_at + _SEARCH_BYTES_MAX) + 1):
        length = RECORD.unpack_from(data, at)[0]
        if 0 < length <= len(data) - at - RECORD.size:
            budget_bytes -= length
            if budget_bytes < 0:
                break
            if _record_end(data, at):
                return at
    return 0


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
