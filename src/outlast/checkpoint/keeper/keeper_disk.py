"""File system steps of the keeper, and faults injected into them by tests.

All file operations of a save use this class, so that a test can observe their order, and end the
process at each of them. Errors are OSError.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

_libc = ctypes.CDLL(None, use_errno=True)
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}  # by this file system
_START, _SETTLE = 2, 7  # sync_file_range: WRITE; WAIT_BEFORE | WRITE | WAIT_AFTER
_CREATE = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC


class KeeperDisk:
    """The file system steps of a save."""

    def make_directory(self, path: Path) -> None:
        """Create a directory and its missing parents; sync each new name into its parent."""
        missing = [parent for parent in (path, *path.parents) if not parent.is_dir()]
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):  # created by another rank meanwhile
                directory.mkdir()
            self.sync_directory(directory.parent)

    def create(self, path: Path) -> int:
        """Create a file; return its descriptor. Raises FileExistsError."""
        return os.open(path, _CREATE, 0o644)

    def open(self, path: Path) -> int:
        """Open a file for reading, without following a symbolic link; return its descriptor."""
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)

    def read(self, fd: int, into: memoryview, at: int) -> None:
        """Fill `into` with the bytes from `at` on; EIO where the file ends before."""
        done = 0
        while done < len(into):
            try:
                count = os.preadv(fd, [into[done:]], at + done)
            except OSError as error:
                # On a file system that requires another alignment.
                if error.errno != errno.EINVAL or self.go_direct(fd, False):
                    raise
                count = os.preadv(fd, [into[done:]], at + done)
            if not count:
                raise OSError(errno.EIO, "the file ends")
            done += count

    def go_direct(self, fd: int, direct: bool) -> bool:
        """Switch between direct and cached I/O; return whether it is direct now."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | (os.O_DIRECT if direct else 0))
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            return False
        return direct

    def allocate(self, fd: int, size_bytes: int) -> None:
        """Allocate the file's blocks, so that a full disk is detected before the first write."""
        # Not posix_fallocate: without file system support the C library writes every block.
        offset, size = ctypes.c_int64(0), ctypes.c_int64(size_bytes)
        if _libc.fallocate(fd, 0, offset, size) == 0:
            return
        number = ctypes.get_errno()
        if number not in _UNSUPPORTED:
            raise OSError(number, os.strerror(number))
        os.ftruncate(fd, size_bytes)

    def write(self, fd: int, data: memoryview, at: int) -> int:
        """Write; return the number of bytes: at least one, maybe fewer than given."""
        written = os.pwrite(fd, data, at)
        if not written:
            raise OSError(errno.EIO, "a write of no bytes")
        return written

    def write_back(self, fd: int, at: int, size_bytes: int, settle: bool) -> None:
        """Start writing this part of the page cache; `settle`: wait, and drop the pages."""
        how = ctypes.c_uint(_SETTLE if settle else _START)
        if _libc.sync_file_range(fd, ctypes.c_int64(at), ctypes.c_int64(size_bytes), how) != 0:
            number = ctypes.get_errno()
            if number not in _UNSUPPORTED:
                raise OSError(number, os.strerror(number))
            if settle:
                os.fdatasync(fd)
        if settle:
            os.posix_fadvise(fd, at, size_bytes, os.POSIX_FADV_DONTNEED)

    def sync(self, fd: int) -> None:
        """Sync a file."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a file."""
        os.close(fd)

    def rename(self, path: Path, to: Path) -> None:
        """Rename a file, replacing one of that name."""
        path.rename(to)

    def link(self, path: Path, to: Path) -> None:
        """Link a file to a second name. Raises FileExistsError."""
        os.link(path, to)

    def remove(self, path: Path) -> None:
        """Remove a file, if it exists."""
        path.unlink(missing_ok=True)

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        path.rmdir()

    def sync_directory(self, path: Path) -> None:
        """Sync a directory, where the file system supports it."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:  # some network file systems do not support it
                raise
        finally:
            os.close(fd)


def write_file(disk: KeeperDisk, path: Path, data: bytes) -> None:
    """Write a new file, complete and synced; the caller syncs the directory."""
    fd = disk.create(path)
    try:
        view = memoryview(data)
        done = 0
        while done < len(view):
            done += disk.write(fd, view[done:], done)
        disk.sync(fd)
    finally:
        disk.close(fd)


class DiskFault(msgspec.Struct, frozen=True):
    """A fault for tests: `action` before the `nth` matching step.

    A step matches if its name is `step` (any, if empty) and the file's name contains `name`.
    `action`: "kill", "hang", or the name of an error (ENOSPC). `attempts`: number of successive
    keepers that have the fault.
    """

    action: str
    step: str = ""
    name: str = ""
    nth: int = 1
    attempts: int = 1


class FaultyDisk(KeeperDisk):
    """A disk that calls `before` with each step and file name."""

    def __init__(self, before: Callable[[str, str], None]) -> None:
        self._before = before
        self._names: dict[int, str] = {}

    def make_directory(self, path: Path) -> None:
        self._before("make_directory", path.name)
        super().make_directory(path)

    def create(self, path: Path) -> int:
        self._before("create", path.name)
        fd = super().create(path)
        self._names[fd] = path.name
        return fd

    def open(self, path: Path) -> int:
        self._before("open", path.name)
        fd = super().open(path)
        self._names[fd] = path.name
        return fd

    def read(self, fd: int, into: memoryview, at: int) -> None:
        self._before("read", self._names[fd])
        super().read(fd, into, at)

    def allocate(self, fd: int, size_bytes: int) -> None:
        self._before("allocate", self._names[fd])
        super().allocate(fd, size_bytes)

    def write(self, fd: int, data: memoryview, at: int) -> int:
        self._before("write", self._names[fd])
        return super().write(fd, data, at)

    def sync(self, fd: int) -> None:
        self._before("sync", self._names[fd])
        super().sync(fd)

    def rename(self, path: Path, to: Path) -> None:
        self._before("rename", to.name)
        super().rename(path, to)

    def link(self, path: Path, to: Path) -> None:
        self._before("link", to.name)
        super().link(path, to)

    def remove(self, path: Path) -> None:
        self._before("remove", path.name)
        super().remove(path)

    def sync_directory(self, path: Path) -> None:
        self._before("sync_directory", path.name)
        super().sync_directory(path)


class _FaultPlan:
    """Counts steps, from several threads, and executes the planned faults."""

    def __init__(self, faults: tuple[DiskFault, ...], attempt: int) -> None:
        self._counts = {fault: fault.nth for fault in faults if attempt < fault.attempts}
        self._lock = threading.Lock()

    def before(self, step: str, name: str) -> None:
        """Count a step, and execute the faults that are due."""
        due = []
        with self._lock:
            for fault in self._counts:
                if fault.step in ("", step) and fault.name in name:
                    self._counts[fault] -= 1
                    due += [fault.action] if self._counts[fault] == 0 else []
        for action in due:
            if action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif action == "hang":
                threading.Event().wait()
            else:
                number = getattr(errno, action)
                raise OSError(number, os.strerror(number))


def disk_of(faults: tuple[DiskFault, ...], attempt: int) -> KeeperDisk:
    """Return the disk of an order: with faults, if a test has set any."""
    return FaultyDisk(_FaultPlan(faults, attempt).before) if faults else KeeperDisk()
