"""Event store: writers, and readers of live and finished runs."""

from __future__ import annotations

import heapq
import os
import re
import socket
import sys
import threading
import time
import warnings
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Full, Queue
from typing import Literal

import msgspec
import xxhash

from outlast.errors import RunDirError
from outlast.events import AnyEvent, Metrics, Note, WorkerSpawned, decoder, encoder
from outlast.telemetry.segment_files import (
    HEADER,
    RECORD,
    SegmentBlock,
    SegmentDamage,
    SegmentReader,
    SegmentWriter,
    segment_paths,
)

DIRECTORY = "events"
BACKLOG_BYTES = 8 << 20
RETRY_S = 1.0
QUEUED_MAX = 50_000  # events that wait for the thread
CLOSE_S = 60.0  # the longest wait for a thread that writes
POLL_S = 0.2
_WIDE = re.compile(rb"\xcf[\x80-\xff]")  # an integer above 63 bits, or bytes that look like one


class EventClock:
    """Monotonic clock of Unix nanoseconds, anchored once to the host's time.

    The `anchor_ns` of another process on this host makes both clocks agree, even if the host's
    time is set.
    """

    def __init__(self, anchor_ns: int | None = None) -> None:
        self.anchor_ns = self._anchor() if anchor_ns is None else anchor_ns

    @staticmethod
    def _anchor() -> int:
        readings = []
        for _ in range(5):
            before_ns = time.monotonic_ns()
            unix_ns = time.time_ns()
            gap_ns = time.monotonic_ns() - before_ns
            readings.append((gap_ns, unix_ns - before_ns - gap_ns // 2))
        return min(readings)[1]

    def now_ns(self) -> int:
        """Return the time in ns since the epoch; monotonic."""
        return time.monotonic_ns() + self.anchor_ns


class EventWriter:
    """Writer of one process's events in `directory`, for all its threads; never raises OSError.

    A full or failing disk must not end a run: events then wait in a backlog of `BACKLOG_BYTES`, the
    oldest are dropped and counted, one line on stderr reports it, and the disk is tried again every
    `RETRY_S` seconds. `in_thread`: a thread writes, so that a file system that stands still stops
    nobody who emits; beyond `QUEUED_MAX` the newest events are dropped then, and counted. Raises
    RunDirError at construction when the directory cannot be made.
    """

    def __init__(
        self,
        directory: Path,
        writer: str,
        clock: EventClock | None = None,
        *,
        in_thread: bool = False,
    ) -> None:
        self._segments = SegmentWriter(directory, writer)
        self._clock = clock or EventClock()
        self._lock = threading.Lock()
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._retry_at_ns = 0
        self._has_reported = False
        self.dropped = 0
        self._queue: Queue[bytes | None] = Queue(QUEUED_MAX)  # None: the end
        self._thread = threading.Thread(target=self._write_queue, daemon=True)
        self._is_threaded = in_thread
        if in_thread:
            self._thread.start()

    def now_ns(self) -> int:
        """Return the present time of this writer's clock, in ns since the epoch."""
        return self._clock.now_ns()

    def emit(self, event: AnyEvent) -> None:
        """Append one event; keep it in the backlog while the file cannot be written."""
        payload = encoder.encode(event)
        if not self._is_threaded:
            self._append(payload)
            return
        try:
            self._queue.put_nowait(payload)
        except Full:
            self.dropped += 1

    def _write_queue(self) -> None:
        while (payload := self._queue.get()) is not None:
            self._append(payload)

    def _append(self, payload: bytes) -> None:
        with self._lock:
            if self._backlog and time.monotonic_ns() >= self._retry_at_ns:
                self._drain()
            if not self._backlog:
                try:
                    self._segments.append(payload)
                except OSError as error:
                    self._refused(error)
                else:
                    if self.dropped:
                        self._drain()  # says so
                    return
            self._keep(payload)

    def close(self) -> None:
        """Write the backlog, if the disk permits, and end the segment."""
        if self._is_threaded:
            self._is_threaded = False
            with suppress(Full):
                self._queue.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                self._report("the file system stands still; the last events may not be written")
                return
        with self._lock:
            if self._backlog:
                self._drain()
            self._segments.close()
            if self._backlog:
                count, self._backlog_bytes = len(self._backlog), 0
                self._backlog.clear()
                self._report(f"the last {count} events were never written")

    def _keep(self, payload: bytes) -> None:
        self._backlog.append(payload)
        self._backlog_bytes += len(payload)
        while self._backlog_bytes > BACKLOG_BYTES:
            self._backlog_bytes -= len(self._backlog.popleft())
            self.dropped += 1

    def _drain(self) -> None:
        try:
            while self._backlog:
                self._segments.append(self._backlog[0])
                self._backlog_bytes -= len(self._backlog.popleft())
            if self.dropped:
                text = f"{self.dropped} events were dropped while they could not be written"
                note = Note(t_ns=self.now_ns(), worker="", seat=-1, text=text)
                self._segments.append(encoder.encode(note))
                self.dropped = 0
        except OSError as error:
            self._refused(error)

    def _refused(self, error: OSError) -> None:
        self._retry_at_ns = time.monotonic_ns() + int(RETRY_S * 1e9)
        if not self._has_reported:
            self._has_reported = True
            self._report(
                f"cannot write events ({error.strerror or error}); the run continues, the newest"
                f" {BACKLOG_BYTES >> 20} MiB of events are kept in memory and tried again"
            )

    def _report(self, text: str) -> None:
        line = f"outlast: {self._segments.directory}: {text}\n"
        try:
            sys.stderr.write(line)
            sys.stderr.flush()
        except (OSError, ValueError):  # ValueError: the stream is closed
            pass  # stderr is often a log file on the same full disk


@dataclass
class _Original:
    """The first segment that was read of those with one beginning: others are copies of it."""

    path: Path
    read_to: int = 0  # byte offset in any of them


class EventReader:
    """Reader of the events of a run since the last poll, by time, over all writers."""

    def __init__(
        self, run_dir: Path, damaged: Callable[[SegmentDamage], None] | None = None
    ) -> None:
        self.directory = run_dir / DIRECTORY
        self._damaged = damaged or _warn
        self._readers: dict[Path, SegmentReader] = {}
        self._originals: dict[bytes, _Original] = {}  # by the digest of the first record
        self._original_of: dict[Path, _Original] = {}

    def poll(self, *, last: bool = False) -> list[AnyEvent]:
        """Return new events. `last`: all writers have ended (see SegmentReader.read_blocks)."""
        polled: list[AnyEvent] = []
        for path, block in self.blocks(last=last):
            records = zip(block.begins, block.ends, strict=True)
            decoded = (self.decode(path, block, begin, end) for begin, end in records)
            polled += [event for event in decoded if event is not None]
        polled.sort(key=_time)
        return polled

    def stream(self, *, last: bool = False) -> Iterator[AnyEvent]:
        """Yield new events by time, each decoded when it is due: a long run's take 3 times the
        memory of its files as a list."""
        by_path: dict[Path, list[SegmentBlock]] = {}
        for path, block in self.blocks(last=last):
            by_path.setdefault(path, []).append(block)
        yield from heapq.merge(*(self._decoded(*each) for each in by_path.items()), key=_time)

    def _decoded(self, path: Path, blocks: list[SegmentBlock]) -> Iterator[AnyEvent]:
        for block in blocks:
            for begin, end in zip(block.begins, block.ends, strict=True):
                if (event := self.decode(path, block, begin, end)) is not None:
                    yield event

    def blocks(self, *, last: bool = False) -> Iterator[tuple[Path, SegmentBlock]]:
        """Yield new records, by path and then in order, without those of copied files."""
        if not self.directory.is_dir():
            return
        for path in segment_paths(self.directory):
            reader = self._readers.setdefault(path, SegmentReader(path))
            for block in reader.read_blocks(self._damaged, last=last):
                own = self._without_copies(path, block)
                if own.begins:
                    yield path, own

    def decode(self, path: Path, block: SegmentBlock, begin: int, end: int) -> AnyEvent | None:
        """Return the event of one record; damage is reported, and None."""
        payload = block.data[begin:end]
        try:
            event = decoder.decode(payload)
            if not _WIDE.search(payload) or _is_in_range(event):
                return event
            what = "no known event: a number of it is beyond 63 bits"
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            what = f"no known event: {error}"
        offset = block.base + begin - RECORD.size
        self._damaged(SegmentDamage(path, offset, end - begin, what))
        return None

    def _without_copies(self, path: Path, block: SegmentBlock) -> SegmentBlock:
        """Leave out records at offsets that a file with the same beginning has had."""
        first = block.base + block.begins[0] - RECORD.size
        if first == HEADER.size:
            digest = xxhash.xxh3_128_digest(block.data[block.begins[0] : block.ends[0]])
            original = self._originals.setdefault(digest, _Original(path))
            self._original_of[path] = original
            if path != original.path:
                what = f"it begins as {original.path.name} does; events of both are read once"
                self._damaged(SegmentDamage(path, first, 0, what))
        original = self._original_of.get(path)
        if original is None:  # its beginning is damaged
            return block
        copied = bisect_left(block.begins, original.read_to - block.base + RECORD.size)
        original.read_to = max(original.read_to, block.base + block.begins[-1] - RECORD.size + 1)
        return block._replace(begins=block.begins[copied:], ends=block.ends[copied:])


def read_events(
    run_dir: Path, damaged: Callable[[SegmentDamage], None] | None = None
) -> list[AnyEvent]:
    """Return every event of a run by time, over all writers; the run may be live or finished.

    Damage is handed to `damaged` (default: a RuntimeWarning) and skipped. Raises RunDirError when
    `run_dir` holds no events at all.
    """
    events = EventReader(run_dir, damaged).poll(last=True)
    if not events:
        raise RunDirError(
            f"{run_dir} holds no events of a run ({run_dir / DIRECTORY} is missing or empty);"
            " give the directory that `outlast run` printed at its start"
        )
    return events


def follow(
    run_dir: Path,
    stop: threading.Event,
    *,
    poll_s: float = POLL_S,
    damaged: Callable[[SegmentDamage], None] | None = None,
    idle: Callable[[], None] = lambda: None,
) -> Iterator[AnyEvent]:
    """Yield events as they appear, until `stop` is set; those present by then are still delivered.

    `idle` is called after each poll without new events, and may set `stop`. Events of one poll
    (`poll_s` seconds) are sorted by time; those of a slow writer may come a poll later.
    """
    reader = EventReader(run_dir, damaged)
    while True:
        stopping = stop.is_set()
        polled = reader.poll(last=stopping)
        yield from polled
        if stopping and stop.is_set():  # the consumer may have cleared `stop`
            return
        if not polled:
            idle()
        stop.wait(poll_s)


def _is_in_range(event: AnyEvent) -> bool:
    numbers = (value for value in msgspec.structs.astuple(event) if isinstance(value, int))
    return all(number < 1 << 63 for number in numbers)


def _time(event: AnyEvent) -> int:
    return event.t_ns


def _warn(damage: SegmentDamage) -> None:
    warnings.warn(str(damage), RuntimeWarning, stacklevel=2)


Life = Literal[
    "running",  # a process on this host holds the run directory, or this host's part of it
    "died",  # no process holds it
    "unknown",  # the run was on another host, or this host has no list of locks
]
LOCKS = Path("/proc/locks")


def life_of(run_dir: Path, events: Iterable[AnyEvent] = (), *, locks: Path = LOCKS) -> Life:
    """Return the state of the launcher of a run without an end.

    `events`: the run's, which name its hosts. A run that has ended would count as "died".
    """
    own, host = [run_dir / "lock"], socket.gethostname()
    parts = {path.parent.name: path for path in run_dir.glob("hosts/*/lock")}  # of several nodes
    own += [parts[host]] if host in parts else []
    try:
        lines = locks.read_text().splitlines()
        if any(_is_locked(path, lines) for path in own):
            return "running"
    except OSError:
        return "unknown"
    spawned = [event.host for event in events if isinstance(event, WorkerSpawned)]
    elsewhere = {*spawned[-1:], *parts} - {host}
    return "unknown" if elsewhere else "died"


def _is_locked(path: Path, lines: list[str]) -> bool:
    """Return whether the list of locks has one of this file. Raises OSError."""
    lock = path.stat()
    words = path.read_text(errors="replace").split()
    device = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}"
    return any(_is_held(line, device, lock.st_ino, words[:1]) for line in lines)


def _is_held(line: str, device: str, inode: int, holder: list[str]) -> bool:
    """Return whether the list of locks has a line for this file.

    `1: FLOCK ADVISORY WRITE 4242 00:2f:1234 0 EOF`. Some file systems show another device here than
    stat does; the holder's record in the file then has to match.
    """
    fields = line.split()
    if len(fields) < 6 or fields[1] != "FLOCK":
        return False
    place, _, number = fields[5].rpartition(":")
    return number == str(inode) and (place == device or [fields[4]] == holder)


Losses = dict[tuple[int, int, str], float]  # (seat, step, name)


def reported_losses(run_dir: Path) -> Losses:
    """Return every loss that the script reported; of a repeated step, the last one."""
    numbers: Losses = {}
    for event in read_events(run_dir):
        if isinstance(event, Metrics):
            for name, value in event.values.items():
                numbers[event.seat, event.step, name] = value
    return numbers


def bit_texts(losses: Losses) -> dict[tuple[int, int, str], str]:
    """Replace each number by its bits, so that -0.0 is not 0.0 and NaN equals itself."""
    return {key: value.hex() for key, value in losses.items()}
