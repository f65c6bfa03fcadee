"""Atomic writes: a file or directory appears complete or not at all.

    draft beside the target -> fsync of the draft -> rename -> fsync of the directory

A test (tests/tidy/test_calls.py) holds all other modules to these functions.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outlast.errors import StorageError, UsageError


def draft_path(target: Path) -> Path:
    """Return a unique name beside `target`."""
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}")


def refuse_existing(target: Path) -> None:
    """Raise UsageError where `target` exists, even as a dangling link."""
    if os.path.lexists(target):
        raise UsageError(f"{target} exists already; nothing was overwritten; name a new one")


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, durable. Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def open_draft(target: Path, *, new: bool = False, durable: bool = True) -> Iterator[Path]:
    """Yield the path of a draft, a file or a directory, that becomes `target` at the end.

    After an error, Ctrl-C as well, the draft is removed and `target` is unchanged.

    Args:
        target: a file is replaced.
        new: refuse a target that exists at the end.
        durable: sync the draft, the files in a draft directory, and the directory around it. False
            only where a loss with the machine is of no importance.

    Raises:
        OSError: the draft could not be written, synced or renamed, or `target` is a device.
        UsageError: with `new`, `target` exists.
    """
    target = target.absolute()
    _refuse_device(target)
    draft = draft_path(target)
    try:
        yield draft
        if durable:
            for path in draft.iterdir() if draft.is_dir() else ():
                sync(path)
            sync(draft)
        if new:
            refuse_existing(target)
        draft.replace(target)
    except BaseException:  # Ctrl-C as well: no draft stays
        _remove(draft)
        raise
    if durable:
        sync(target.parent)


def _refuse_device(target: Path) -> None:
    """Raise OSError where a rename would replace a device, a pipe or a socket: root could."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        mode = target.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
            raise OSError(errno.EINVAL, "a device, a pipe or a socket is not replaced")


def _remove(draft: Path) -> None:
    """Remove a draft as far as possible: the error that came first is the one to report."""
    import shutil  # rarely needed, and not quick to import

    if draft.is_dir():
        shutil.rmtree(draft, ignore_errors=True)
        return
    try:
        draft.unlink(missing_ok=True)
    except OSError:
        return


def replace_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file, or replace it: a reader sees the old one or the new one. Raises OSError."""
    with open_draft(path, durable=durable) as draft:
        draft.write_bytes(data)


def write_new(path: Path, text: str | None, flag: str = "--out") -> None:
    """Write a new file, complete or not at all; None: only check that it can be written. `flag`:
    of the command that names the file.

    Raises UsageError, StorageError.
    """
    refuse_existing(path)
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{flag} {path}: there is no directory {path.absolute().parent}")
    if text is None:
        return
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise StorageError(
            f"{path} could not be written: {error.strerror}; nothing was kept of it"
        ) from error
