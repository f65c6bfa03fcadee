"""Checkpoints in a folder of a POSIX file system, local or shared.

No symbolic link below the root is ever followed, so that nothing outside of it is read or
written. The root itself may be one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from outlast.checkpoint.format.manifests import COMMIT, LATEST
from outlast.checkpoint.stores.chunk_reader import ANSWER_S, IoTimeout, call_in_thread
from outlast.checkpoint.stores.store_interfaces import GET_BYTES_MAX, Inode, check_name
from outlast.errors import CorruptionError, InUseError, StorageError

_BLOCK_BYTES = 4096
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | _SAFE  # a pipe in a file's place must not stop the reader
_WRITE = os.O_WRONLY | os.O_CREAT | _SAFE
_DRAFT_TRIES = 8
_SYNC_BYTES = 256 << 20  # at a time, so that no sync has more to do: each has the same deadline
_NO_DIRECT = {errno.EINVAL, errno.ENOTSUP}
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}
_MISSING_ERRNOS = {
    errno.ENOENT: "is missing",
    errno.ENOTDIR: "its parent is no directory of this root",
    errno.ELOOP: "is a symbolic link, which is not followed",
}
P = ParamSpec("P")
T = TypeVar("T")


def _with_timeout(do: Callable[Concatenate[Folder, P], T]) -> Callable[Concatenate[Folder, P], T]:
    """Run a method under the folder's I/O timeout: the file system may not answer."""

    @wraps(do)
    def patient(self: Folder, /, *args: P.args, **kwargs: P.kwargs) -> T:
        where = "/".join([self.where, *(arg for arg in args[:2] if isinstance(arg, str))])
        return self._patience.call(where, lambda: do(self, *args, **kwargs))

    return patient


class Folder:
    """The Store of a directory.

    A file system that makes no progress for `answer_s` is a StalledError. A call that hangs stays
    behind in a thread, which keeps no process alive.
    """

    def __init__(self, root: Path, answer_s: float = ANSWER_S) -> None:
        self.root = root
        self._patience = IoTimeout(answer_s)

    @property
    def where(self) -> str:
        """Return the path of the root."""
        return str(self.root)

    @_with_timeout
    def directories(self) -> list[str]:
        try:
            with os.scandir(self.root) as entries:
                return [entry.name for entry in entries if entry.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"{self.root}: could not be listed: {error.strerror}") from error

    @_with_timeout
    def files(self, directory: str) -> dict[str, int]:
        path = self.root / check_name(directory)
        sizes: dict[str, int] = {}
        try:
            with _directory(path) as at, os.scandir(at) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # removed meanwhile
                        status = entry.stat(follow_symlinks=False)
                        sizes[entry.name] = status.st_size if stat.S_ISREG(status.st_mode) else -1
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise _unreadable(path, error) from error
        return sizes

    @_with_timeout
    def get(self, directory: str, name: str) -> bytes:
        with self._reading(directory, name) as (path, file):
            size = os.fstat(file).st_size
            if size > GET_BYTES_MAX:
                raise CorruptionError(f"{path}: {size} bytes are more than a record can have")
            data = bytearray(size)
            return bytes(data[: _fill(file, 0, memoryview(data))])

    @_with_timeout
    def read(self, directory: str, name: str, at: int, into: memoryview) -> None:
        """See StoreSource.read; bypasses the page cache if alignment and file system allow it."""
        done = 0
        if at % _BLOCK_BYTES == len(into) % _BLOCK_BYTES == 0:
            try:
                with self._reading(directory, name, os.O_DIRECT) as (_, file):
                    done = _fill(file, at, into)
            except StorageError as error:
                if getattr(error.__cause__, "errno", 0) not in _NO_DIRECT:
                    raise
        if done < len(into):
            with self._reading(directory, name) as (path, file):
                done += _fill(file, at + done, into[done:])
                if done < len(into):
                    raise CorruptionError(
                        f"{path}: ends at byte {at + done}, where bytes {at} to {at + len(into)}"
                        " were wanted"
                    )

    def put(
        self, directory: str, name: str, parts: Iterable[bytes | memoryview], size_bytes: int
    ) -> None:
        self._put(directory, name, call_in_thread(iter(parts)), size_bytes)

    @_with_timeout
    def _put(
        self, directory: str, name: str, parts: Iterable[bytes | memoryview], size_bytes: int
    ) -> None:
        with self._writing(directory, check_name(name)) as (path, at):
            draft = f"{name}.part"
            file = _open_draft(draft, at, path)
            try:
                os.ftruncate(file, 0)  # remains of a killed writer
                written = 0
                for part in parts:
                    before, written = written, written + _write(file, part)
                    if before // _SYNC_BYTES < written // _SYNC_BYTES:
                        os.fdatasync(file)
                if written != size_bytes:
                    text = f"{path}: {written} of {size_bytes} bytes were given; not written"
                    raise StorageError(text)
                os.fsync(file)
                os.rename(draft, name, src_dir_fd=at, dst_dir_fd=at)
            except BaseException:  # Ctrl-C as well: no draft stays
                with suppress(OSError):  # the first error is the one to report
                    os.unlink(draft, dir_fd=at)
                raise
            finally:
                os.close(file)
            os.fsync(at)

    @_with_timeout
    def link(self, directory: str, name: str, other: str) -> bool:
        """See LinkingStore.link."""
        try:
            with (
                self._writing(directory, check_name(name)) as (_, at),
                _directory(self.root / check_name(other)) as source,
            ):
                if not stat.S_ISREG(os.stat(name, dir_fd=source, follow_symlinks=False).st_mode):
                    return False
                os.link(name, name, src_dir_fd=source, dst_dir_fd=at, follow_symlinks=False)
                os.fsync(at)
        except StorageError:
            return False
        return True

    @_with_timeout
    def inodes(self, directory: str) -> dict[str, Inode]:
        """See LinkingStore.inodes."""
        path, inodes = self.root / check_name(directory), dict[str, Inode]()
        with suppress(OSError), _directory(path) as at, os.scandir(at) as entries:
            for entry in entries:
                this = entry.stat(follow_symlinks=False)
                inodes[entry.name] = Inode((this.st_dev, this.st_ino), this.st_size, this.st_nlink)
        return inodes

    @_with_timeout
    def create(self, directory: str, name: str, data: bytes) -> bool:
        with self._writing(directory, check_name(name)) as (_, at):
            draft = _write_draft(name, at, data)
            try:
                os.link(draft, name, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
            except FileExistsError:
                return False
            finally:
                os.unlink(draft, dir_fd=at)
            os.fsync(at)
        self._sync_root()
        return True

    @_with_timeout
    def point(self, directory: str) -> None:
        name = check_name(directory)
        try:
            with _directory(self.root, follow=True) as at:
                draft = _write_draft(LATEST, at, f"{name}\n".encode())
                os.rename(draft, LATEST, src_dir_fd=at, dst_dir_fd=at)
                os.fsync(at)
        except OSError as error:
            raise _unwritable(self.root / LATEST, error) from error

    @_with_timeout
    def remove(self, directory: str) -> None:
        """See Store.remove; raises InUseError while a reader holds the checkpoint."""
        path = self.root / check_name(directory)
        try:
            with _directory(path) as at, _exclusive(path, at):
                with suppress(FileNotFoundError):
                    os.unlink(COMMIT, dir_fd=at)
                os.fsync(at)
            shutil.rmtree(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(
                f"{path}: could not be removed: {error.strerror or error}; its commit record was"
                " removed first, so that the remaining files do not count as a checkpoint"
            ) from error
        self._sync_root()

    @contextmanager
    def hold(self, directory: str) -> Iterator[None]:
        """See HoldingSource.hold: by a lock, on hosts that share the file system's locks."""
        file = self._hold(check_name(directory))
        try:
            yield
        finally:
            if file >= 0:
                os.close(file)

    @_with_timeout
    def _hold(self, directory: str) -> int:
        try:
            with _directory(self.root / directory) as at:
                file = os.open(COMMIT, _READ, dir_fd=at)
        except OSError:
            return -1  # the read reports the error
        with suppress(OSError):  # it is being removed, or there are no locks here
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return file

    @_with_timeout
    def quiet_s(self, directory: str) -> float:
        """Return the seconds since a file came or went in a directory, by the file server."""
        path = self.root / check_name(directory)
        try:
            with tempfile.TemporaryFile(dir=self.root) as now:
                return os.fstat(now.fileno()).st_mtime - path.stat().st_mtime
        except OSError as error:
            raise _unreadable(path, error) from error

    @contextmanager
    def _reading(self, directory: str, name: str, flags: int = 0) -> Iterator[tuple[Path, int]]:
        """Open a regular file for reading; yield its path for messages and its descriptor."""
        path = self.root / check_name(directory) / check_name(name)
        try:
            with _directory(path.parent) as at:
                file = os.open(name, _READ | flags, dir_fd=at)
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise CorruptionError(f"{path}: is no regular file; nothing was read from it")
                yield path, file
            finally:
                os.close(file)
        except OSError as error:
            raise _unreadable(path, error) from error

    @contextmanager
    def _writing(self, directory: str, name: str) -> Iterator[tuple[Path, int]]:
        """Open the directory of a file (created if missing); yield the file's path and it."""
        path = self.root / check_name(directory) / name
        try:
            if not path.parent.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                self._sync_root()
                _sync(self.root.parent)
            with _directory(path.parent) as at:
                yield path, at
        except OSError as error:
            raise _unwritable(path, error) from error

    def _sync_root(self) -> None:
        try:
            _sync(self.root)
        except OSError as error:
            raise _unwritable(self.root, error) from error


@contextmanager
def _directory(path: Path, follow: bool = False) -> Iterator[int]:
    at = os.open(path, os.O_RDONLY | os.O_DIRECTORY | (os.O_CLOEXEC if follow else _SAFE))
    try:
        yield at
    finally:
        os.close(at)


def _sync(path: Path) -> None:
    with _directory(path, follow=True) as at:
        os.fsync(at)


@contextmanager
def _exclusive(path: Path, at: int) -> Iterator[None]:
    """Exclude readers that hold this checkpoint. Raises InUseError if there is one."""
    try:
        file = os.open(COMMIT, os.O_RDWR | os.O_NONBLOCK | _SAFE, dir_fd=at)
    except OSError:  # no checkpoint, or no lockable file: not held
        yield
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise InUseError(f"{path}: is being read; it was left as it is") from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(file)
            raise
    try:
        yield
    finally:
        os.close(file)


def _open_draft(draft: str, at: int, path: Path) -> int:
    """Open a draft that no other process writes: locked, and verified under its name."""
    for _ in range(_DRAFT_TRIES):
        file = os.open(draft, _WRITE, 0o644, dir_fd=at)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            break
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(file)
                raise
        with suppress(FileNotFoundError):
            status = os.fstat(file)
            if os.path.samestat(status, os.stat(draft, dir_fd=at, follow_symlinks=False)):
                if status.st_nlink == 1:
                    return file
                os.unlink(draft, dir_fd=at)  # other links must keep their contents
        os.close(file)  # its writer renamed it between our open and our lock
    raise StorageError(f"{path}: another process is writing it; nothing was changed; retry later")


def _write_draft(name: str, at: int, data: bytes) -> str:
    """Write and sync a small file under a unique name; return the name."""
    draft = f".{name}.{secrets.token_hex(8)}"
    file = os.open(draft, _WRITE | os.O_EXCL, 0o644, dir_fd=at)
    try:
        _write(file, data)
        os.fsync(file)
    except BaseException:  # Ctrl-C as well: no draft stays
        os.unlink(draft, dir_fd=at)
        raise
    finally:
        os.close(file)
    return draft


def _write(file: int, part: bytes | memoryview) -> int:
    rest = memoryview(part).cast("B")
    size = len(rest)
    while rest:
        rest = rest[os.write(file, rest) :]
    return size


def _fill(file: int, at: int, into: memoryview) -> int:
    """Fill `into` from the file; return the number of bytes, fewer at the end of the file."""
    done = 0
    while done < len(into) and (count := os.preadv(file, [into[done:]], at + done)):
        done += count
    return done


def _unreadable(path: Path, error: OSError) -> CorruptionError | StorageError:
    if fault := _MISSING_ERRNOS.get(error.errno or 0):
        return CorruptionError(f"{path}: {fault}; nothing was read from it")
    return StorageError(f"{path}: could not be read: {error.strerror or error}")


def _unwritable(path: Path, error: OSError) -> StorageError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return StorageError(
        f"{path}: could not be written: {error.strerror or error}; nothing was kept of it;"
        f" {'free some space' if full else 'see to it'}, older checkpoints are untouched"
    )
