"""Shared memory of trainer and keeper, and the free memory within limits.

A copy into fresh pages costs many times one into resident pages; all pages of an arena are
resident.

Free memory is the host's, or less where a control group limits this process; inside containers the
kernel shows the host's figures.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from outlast.errors import CorruptionError, StorageError

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
# By version of the interface: where the hierarchy is mounted, its limit, its use, and the line of
# memory.stat with the memory that the kernel can reclaim.
_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


class MemoryHeadroom(NamedTuple):
    """One limit of memory. `used_bytes` excludes memory that the kernel can reclaim."""

    free_bytes: int
    scope: str
    limit_bytes: int
    used_bytes: int


def check_memory(wanted_bytes: int, what: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
    """Raise StorageError with the arithmetic when `wanted_bytes` more would break a limit."""
    room = tightest_limit(proc, cgroups)
    if wanted_bytes > room.free_bytes:
        raise StorageError(
            f"not enough memory for {what}: {as_size(wanted_bytes)} are needed; the memory"
            f" {room.scope} is {as_size(room.limit_bytes)}, of which {as_size(room.used_bytes)} are"
            f" in use and {as_size(room.free_bytes)} are free; nothing was allocated; raise the"
            " limit, use fewer arenas, or divide the state among more ranks"
        )


def tightest_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> MemoryHeadroom:
    """Return the limit with the least free memory; limits that cannot be read are ignored."""
    limits = [*_control_groups(proc, cgroups)]
    host = dict(line.split()[:2] for line in _lines(proc / "meminfo"))
    if "MemAvailable:" in host:
        free, total = (int(host.get(key, "0")) << 10 for key in ("MemAvailable:", "MemTotal:"))
        limits.append(MemoryHeadroom(free, "of this host", total, max(0, total - free)))
    unlimited = MemoryHeadroom(1 << 63, "without a limit", 1 << 63, 0)
    return min(limits, default=unlimited, key=lambda room: room.free_bytes)


def as_size(size_bytes: int) -> str:
    """Return a size with three digits and a decimal unit."""
    size, unit = float(size_bytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"


def _control_groups(proc: Path, cgroups: Path) -> list[MemoryHeadroom]:
    """Return every memory limit of this process's control groups."""
    limits = []
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        version, mount = (1, cgroups / "memory") if controllers else (2, cgroups)
        # In a cgroup namespace the group's path does not exist below the mount, and the mount
        # itself is the group. Outside, every parent group has a limit of its own.
        group = mount / name.strip("/")
        for path in (group, *group.parents):
            if room := _headroom_of(path, version):
                limits.append(room)
            if path == mount:
                break
    return limits


def _headroom_of(group: Path, version: int) -> MemoryHeadroom | None:
    limit_name, use_name, given_back = _FILES[version]
    limit, use = _lines(group / limit_name), _lines(group / use_name)
    if not limit or not use or limit[0] == "max":
        return None
    stat = dict(line.split(" ", 1) for line in _lines(group / "memory.stat"))
    limit_bytes = int(limit[0])
    used_bytes = int(use[0]) - int(stat.get(given_back, 0))
    free_bytes = max(0, limit_bytes - used_bytes)
    return MemoryHeadroom(free_bytes, f"of the control group {group}", limit_bytes, used_bytes)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


ALIGN_BYTES = 2 << 20
PAGE_BYTES = 4096
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # MADV_*: Linux 5.14, and not in Python's mmap
_STEP_BYTES = 8 << 20  # no other thread can map memory during a step
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_STAMP = struct.Struct("<q")
_LIBC = ctypes.CDLL(None, use_errno=True)  # mmap.madvise holds the interpreter's lock


class Arena:
    """One shared mapping of `size_bytes`, with a stamp behind it that identifies its contents.

    Its size is sealed: no holder of the descriptor can truncate the memory under a writer. The
    stamp is in the memory itself, so that it stays correct after the trainer was killed.
    """

    def __init__(self, fd: int, size_bytes: int, mapping: mmap.mmap) -> None:
        """Use `create` or `attach`. The arena owns `fd`."""
        self.fd = fd
        self.size_bytes = size_bytes
        self.view = memoryview(mapping)[:size_bytes]
        self._mapping = mapping

    @classmethod
    def create(cls, size_bytes: int, wanted: Callable[[], bool] = lambda: True) -> Arena:
        """Allocate at least `size_bytes` (rounded up to 2 MiB), with every page present.

        Raises StorageError with the arithmetic when there is not enough memory, and soon after
        `wanted` returns False. Other threads run meanwhile.
        """
        size_bytes = max(1, -(-size_bytes // ALIGN_BYTES)) * ALIGN_BYTES
        what = f"an arena of {as_size(size_bytes)}"
        check_memory(size_bytes, what)
        fd = -1
        try:
            fd = os.memfd_create("outlast-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, size_bytes + PAGE_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            mapping = mmap.mmap(fd, size_bytes + PAGE_BYTES)
            _populate(mapping, _POPULATE_WRITE, wanted)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise StorageError(
                f"not enough memory for {what}: {error.strerror}; nothing was allocated; free"
                " memory, or raise the container's limit"
            ) from error
        return cls(fd, size_bytes, mapping)

    @classmethod
    def attach(cls, fd: int, size_bytes: int) -> Arena:
        """Map the arena behind a received descriptor, which it then owns.

        Raises StorageError when that is no sealed memory of this size; `fd` is closed then.
        """
        with _checked_descriptor(fd, size_bytes):
            mapping = mmap.mmap(fd, size_bytes + PAGE_BYTES)
            _populate(mapping, _POPULATE_READ)
        return cls(fd, size_bytes, mapping)

    @property
    def stamp(self) -> int:
        """Return the number that identifies the complete copy in the memory; 0 for none."""
        return _STAMP.unpack_from(self._mapping, self.size_bytes)[0]

    @stamp.setter
    def stamp(self, value: int) -> None:
        _STAMP.pack_into(self._mapping, self.size_bytes, value)

    def close(self) -> None:
        """Release the memory; it is freed with the last view of it."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        with contextlib.suppress(BufferError):
            self.view.release()
            self._mapping.close()


class Unmapped:
    """An arena's memory, read through its descriptor.

    Mapping memory that is read once costs more than copying it.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Take ownership of `fd`. Closes it and raises StorageError when it is no arena."""
        with _checked_descriptor(fd, size_bytes):
            self.fd = fd
            self.size_bytes = size_bytes

    def read(self, at: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `at` on. Raises CorruptionError where they end."""
        done = 0
        while done < len(into):
            count = os.preadv(self.fd, [into[done:]], at + done)
            if not count or at + done + count > self.size_bytes:
                raise CorruptionError(f"an arena of {self.size_bytes} bytes ends before {at}")
            done += count

    def close(self) -> None:
        """Release the memory."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@contextlib.contextmanager
def _checked_descriptor(fd: int, size_bytes: int) -> Iterator[None]:
    """Close a received descriptor where it is no arena of this size; raise StorageError."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        found_bytes = os.fstat(fd).st_size - PAGE_BYTES
        if not sealed or found_bytes != size_bytes:
            raise OSError(errno.EINVAL, f"{found_bytes} bytes{'' if sealed else ', not sealed'}")
        yield
    except OSError as error:
        os.close(fd)
        raise StorageError(
            f"descriptor {fd} is no arena of {size_bytes} bytes: {error.strerror}"
        ) from error


def _populate(mapping: mmap.mmap, how: int, wanted: Callable[[], bool] = lambda: True) -> None:
    """Make every page present. Raises OSError when memory is refused, or not wanted."""
    first = ctypes.c_char.from_buffer(mapping)  # the mapping cannot be closed while this exists
    for at in range(0, len(mapping), _STEP_BYTES):
        size_bytes = min(_STEP_BYTES, len(mapping) - at)
        where = ctypes.c_void_p(ctypes.addressof(first) + at)
        if not wanted():
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        if _LIBC.madvise(where, ctypes.c_size_t(size_bytes), how) == 0:
            continue
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            raise OSError(code, os.strerror(code))
        # Before Linux 5.14: write to each page; pages to read are populated on first use.
        if how == _POPULATE_WRITE:
            pages = memoryview(mapping)[at : at + size_bytes : PAGE_BYTES]
            pages[:] = bytes(len(pages))
