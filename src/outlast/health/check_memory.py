"""Memory of checks between runs: rises of counters, flaps, lasting findings, their file.

Updates are pure: `updated_memory` returns the memory after a check.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from outlast.atomic_files import replace_file
from outlast.errors import StorageError
from outlast.log_records import Finding

SECOND_NS = 10**9
POINTS_MAX = 96  # per counter
KEEP_S = 7200.0  # at least: errors are counted by the hour
KEYS_MAX = 4096  # of each kind; the oldest are dropped first
EVENTS_MAX = 256  # per link
RESET = 0  # value of a counter after a reset

Point = tuple[int, int]  # t_ns, value


class FlapRule(NamedTuple):
    """Definition of a flap: `times` events within `window_s`, until none came for `recovery_s`."""

    times: int
    window_s: float
    recovery_s: float


class Flap(msgspec.Struct, frozen=True):
    """Recent events of a link, oldest first, and whether it flaps."""

    events: tuple[int, ...] = ()
    flapping: bool = False


class HeldFinding(msgspec.Struct, frozen=True):
    """Finding of an event, with the times of its first and last occurrence."""

    finding: Finding
    first_ns: int
    last_ns: int


class StuckProcess(msgspec.Struct, frozen=True):
    """Process that could not be killed.

    `start`: ticks from boot to its start, since process ids are reused.
    """

    pid: int
    start: int
    since_ns: int


class CheckMemory(msgspec.Struct, frozen=True, kw_only=True):
    """State of the checks between runs.

    `boot`: boot id of the kernel log and of the held findings.
    """

    version: int = 1
    boot: str = ""
    counters: dict[str, tuple[Point, ...]] = {}
    flaps: dict[str, Flap] = {}
    findings: dict[str, HeldFinding] = msgspec.field(default_factory=dict, name="held")
    stuck: dict[str, StuckProcess] = {}


def counter_steps(points: Sequence[Point]) -> Iterable[Point]:
    """Yield the rise of a counter between consecutive points; after a reset, from zero."""
    for (_, before), (t_ns, value) in pairwise(points):
        yield t_ns, value - before if value >= before else value - RESET


def counter_rise(points: Sequence[Point], value: int, now_ns: int, window_s: float) -> int | None:
    """Return the rise since the last point at or before the window's begin, or the oldest point.

    None without points.
    """
    if not points:
        return None
    begin = now_ns - round(window_s * SECOND_NS)
    older = [k for k, (t_ns, _) in enumerate(points) if t_ns <= begin]
    window = [*points[older[-1] if older else 0 :], (now_ns, value)]
    return sum(step for _, step in counter_steps(window))


def flap_after(memory: CheckMemory, key: str, value: int, now_ns: int, rule: FlapRule) -> Flap:
    """Return a link's flap state after its event counter read `value`."""
    flap = memory.flaps.get(key, Flap())
    points = memory.counters.get(key, ())
    new = [] if not points else [step for _, step in counter_steps([points[-1], (now_ns, value)])]
    return _flap(flap, sum(new), now_ns, rule)


def _flap(flap: Flap, new: int, now_ns: int, rule: FlapRule) -> Flap:
    begin = now_ns - round(rule.window_s * SECOND_NS)
    past = [min(t_ns, now_ns) for t_ns in flap.events]  # the clock may have been set back
    events = (*past, *[now_ns] * min(new, EVENTS_MAX))[-EVENTS_MAX:]
    flapping = flap.flapping or sum(t_ns > begin for t_ns in events) >= rule.times
    quiet = not events or now_ns - events[-1] >= round(rule.recovery_s * SECOND_NS)
    if flapping and quiet:
        return Flap()
    recent = tuple(t_ns for t_ns in events if t_ns > begin)
    return Flap(recent or events[-1:] if flapping else recent, flapping)


def key_of(finding: Finding) -> str:
    """Return the identity of a finding: check, symptom, code and device."""
    return "|".join((finding.check, finding.symptom, finding.code, finding.device))


def still_holding(
    memory: CheckMemory, found: Iterable[Finding], now_ns: int, recovery_s: float
) -> list[HeldFinding]:
    """Return the held findings that are not found now and not yet quiet for `recovery_s`."""
    now = {key_of(one) for one in found}
    quiet_ns = round(recovery_s * SECOND_NS)
    return [
        earlier
        for key, earlier in memory.findings.items()
        if key not in now and now_ns - earlier.last_ns < quiet_ns
    ]


def updated_memory(
    memory: CheckMemory,
    *,
    boot: str,
    counts: Mapping[str, tuple[int, bool]],
    events: Iterable[Finding],
    now_ns: int,
    rule: FlapRule,
) -> CheckMemory:
    """Return the memory after a check.

    `counts`: value, and whether it counts link events. `events`: new event findings; a healthy one
    ends the held finding of the same key. A reboot ends all held findings, but not the flaps.
    """
    active = {
        key: replace(one, last_ns=min(one.last_ns, now_ns))  # where the clock was set back
        for key, one in (memory.findings if boot == memory.boot else {}).items()
        if now_ns - one.last_ns < round(rule.recovery_s * SECOND_NS)
    }
    for one in events:
        key = key_of(one)
        before = active.get(key)
        if one.severity == "healthy":
            active.pop(key, None)
            continue
        last = max(one.t_ns, before.last_ns) if before else one.t_ns
        active[key] = HeldFinding(one, before.first_ns if before else one.t_ns, last)
    flaps = dict(memory.flaps)
    counters = dict(memory.counters)
    keep_ns = round(max(rule.window_s + rule.recovery_s, KEEP_S) * SECOND_NS)
    for key, (value, is_event) in counts.items():
        if is_event:
            flaps[key] = flap_after(memory, key, value, now_ns, rule)
        counters[key] = _thin((*memory.counters.get(key, ()), (now_ns, value)), now_ns - keep_ns)
    return replace(
        memory,
        boot=boot,
        counters=_newest(counters, lambda points: points[-1][0]),
        findings=_newest(active, lambda one: one.last_ns),
        flaps={key: one for key, one in flaps.items() if one.events or one.flapping},
    )


def _thin(points: tuple[Point, ...], begin_ns: int) -> tuple[Point, ...]:
    """Drop points before the last one at or before `begin_ns`.

    If more than POINTS_MAX remain, drop every other point of the older half.
    """
    older = [k for k, (t_ns, _) in enumerate(points) if t_ns <= begin_ns]
    points = points[older[-1] if older else 0 :]
    if len(points) <= POINTS_MAX:
        return points
    half = len(points) // 2
    return (*points[:half:2], *points[half:])


V = TypeVar("V")


def _newest(table: dict[str, V], when: Callable[[V], int]) -> dict[str, V]:
    if len(table) <= KEYS_MAX:
        return table
    return dict(sorted(table.items(), key=lambda item: when(item[1]))[-KEYS_MAX:])


FILE = "check.json"
LOCK = "check.lock"
FILE_BYTES_MAX = 16 << 20
TRY_S = 0.02  # between two tries at the lock
ASIDE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class StoredMemory(NamedTuple):
    """Memory read from disk. `note`: the reason for a fresh start, or ""."""

    memory: CheckMemory
    note: str = ""


@contextlib.contextmanager
def lock_state(directory: Path, within_s: float) -> Iterator[None]:
    """Hold the exclusive lock of the state directory.

    Raises StorageError if the directory cannot be created or locked, is writable by others, or is
    locked for longer than `within_s`.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        refuse_shared_directory(directory)
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | ASIDE, 0o600)
    except OSError as error:
        raise StorageError(
            f"the state directory {directory} cannot be used: {error.strerror}; name another one"
        ) from error
    until = time.monotonic() + within_s
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise StorageError(
                        f"another check has locked the state directory {directory} for more than"
                        f" {within_s:.0f} s; nothing was written to it"
                    ) from None
                time.sleep(TRY_S)  # flock has no deadline of its own
        yield
    finally:
        os.close(lock)


def read_memory(directory: Path) -> StoredMemory:
    """Read the memory; start afresh, with a note, if it is missing, damaged or of another version.

    Raises StorageError if the file cannot be read.
    """
    path = directory / FILE
    try:
        refuse_shared_directory(directory)
        with open(path, "rb", opener=_is_ours) as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return StoredMemory(
            CheckMemory(), f"{path} does not exist yet: counters are judged from the next check on"
        )
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}; nothing was written") from error
    try:
        if len(data) > FILE_BYTES_MAX:
            raise ValueError(f"larger than {FILE_BYTES_MAX:,} bytes")
        memory = msgspec.json.decode(data, type=CheckMemory)
    except (ValueError, RecursionError) as error:
        return StoredMemory(
            CheckMemory(), f"{path} is damaged ({error}): its content is lost; a new state begins"
        )
    if memory.version != CheckMemory().version:
        return StoredMemory(
            CheckMemory(), f"{path} has unknown version {memory.version}; a new state begins"
        )
    return StoredMemory(memory)


def refuse_shared_directory(directory: Path) -> None:
    """Refuse a directory that another user may have created or can write to.

    Raises StorageError; OSError if it does not exist.
    """
    found = directory.lstat()
    why = ""
    if stat.S_ISLNK(found.st_mode):
        why = "is a link: name the directory itself"
    elif found.st_uid not in {0, os.geteuid()}:
        why = f"belongs to another user ({found.st_uid})"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = "can be written by others: chmod go-w"
    elif open_ := [str(each) for each in directory.absolute().parents if _is_open(each)]:
        why = f"lies in {open_[0]}, where any user can replace it"
    if why:
        raise StorageError(f"the state directory {directory} {why}; it was not used")


def _is_open(directory: Path) -> bool:
    mode = directory.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def _is_ours(path: str, _flags: int) -> int:
    """Open a regular file for reading, without following links. Raises OSError."""
    file = os.open(path, os.O_RDONLY | ASIDE)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "is no file")
    return file


def write_memory(directory: Path, memory: CheckMemory) -> None:
    """Write the memory atomically. Raises StorageError; the previous file is then unchanged."""
    path = directory / FILE
    try:
        replace_file(path, msgspec.json.encode(memory))
    except OSError as error:
        raise StorageError(
            f"{path} could not be written: {error.strerror}; it is unchanged"
        ) from error
