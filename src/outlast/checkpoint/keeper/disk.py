"""What the keeper asks of a file system: each method is one step, and a crash may follow any.

Everything that a save does to files goes through here, so that a test can watch the order of the
steps, and end the process at each of them. Errors are OSError.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_NOT_HERE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}  # a file system that cannot do it
_START, _SETTLE = 2, 7  # sync_file_range: WRITE; WAIT_BEFORE | WRITE | WAIT_AFTER
_CREATE = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC


class Disk:
    """The real one."""

    def make_directory(self, path: Path) -> None:
        """It and its parents, where they are missing; each new name is synced into its parent."""
        missing = [one for one in (path, *path.parents) if not one.is_dir()]
        for one in reversed(missing):
            with contextlib.suppress(FileExistsError):  # of another rank, since we looked
                one.mkdir()
            self.sync_directory(one.parent)

    def create(self, path: Path) -> int:
        """A descriptor of a new file; FileExistsError where there is one."""
        return os.open(path, _CREATE, 0o644)

    def open(self, path: Path) -> int:
        """A descriptor to read a file with; no link of that name is followed."""
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)

    def read(self, fd: int, into: memoryview, at: int) -> None:
        """Fill `into` with the bytes from `at` on; EIO where the file ends before."""
        done = 0
        while done < len(into):
            try:
                count = os.preadv(fd, [into[done:]], at + done)
            except OSError as error:
                # On a file system that wants another alignment than ours.
                if error.errno != errno.EINVAL or self.go_direct(fd, False):
                    raise
                count = os.preadv(fd, [into[done:]], at + done)
            if not count:
                raise OSError(errno.EIO, "the file ends")
            done += count

    def go_direct(self, fd: int, direct: bool) -> bool:
        """Read and write past the page cache from here on, or through it; whether it is past it
        now."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | (os.O_DIRECT if direct else 0))
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            return False
        return direct

    def allocate(self, fd: int, size_bytes: int) -> None:
        """Take the file's blocks now, so that a full disk is heard of before the first byte."""
        # Not posix_fallocate: where the file system cannot, the C library would write each block.
        offset, size = ctypes.c_int64(0), ctypes.c_int64(size_bytes)
        if _libc.fallocate(fd, 0, offset, size) == 0:
            return
        number = ctypes.get_errno()
        if number not in _NOT_HERE:
            raise OSError(number, os.strerror(number))
        os.ftruncate(fd, size_bytes)

    def write(self, fd: int, data: memoryview, at: int) -> int:
        """How many bytes were written: at least one, maybe fewer than there are."""
        written = os.pwrite(fd, data, at)
        if not written:
            raise OSError(errno.EIO, "a write of no bytes")
        return written

    def write_back(self, fd: int, at: int, size_bytes: int, settle: bool) -> None:
        """Start writing this part of the page cache; with `settle` wait for it and let it go."""
        how = ctypes.c_uint(_SETTLE if settle else _START)
        if _libc.sync_file_range(fd, ctypes.c_int64(at), ctypes.c_int64(size_bytes), how) != 0:
            number = ctypes.get_errno()
            if number not in _NOT_HERE:
                raise OSError(number, os.strerror(number))
            if settle:
                os.fdatasync(fd)
        if settle:
            os.posix_fadvise(fd, at, size_bytes, os.POSIX_FADV_DONTNEED)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, path: Path, to: Path) -> None:
        path.rename(to)

    def link(self, path: Path, to: Path) -> None:
        """A second name of a file; FileExistsError where there is one."""
        os.link(path, to)

    def remove(self, path: Path) -> None:
        """Remove a file, or nothing where there is none."""
        path.unlink(missing_ok=True)

    def remove_directory(self, path: Path) -> None:
        path.rmdir()

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NOT_HERE:  # some network file systems keep no such promise
                raise
        finally:
            os.close(fd)


def write_file(disk: Disk, path: Path, data: bytes) -> None:
    """A new file, whole and synced. Not the directory: the caller syncs that."""
    fd = disk.create(path)
    try:
        view = memoryview(data)
        done = 0
        while done < len(view):
            done += disk.write(fd, view[done:], done)
        disk.sync(fd)
    finally:
        disk.close(fd)
