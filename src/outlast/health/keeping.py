"""The state directory: one file that is there whole or not at all, also for two checks at once.

Who checks is root as a rule, and what is remembered can drain a node or hide a fault: so nobody
else may be able to write there, and nothing in it is followed or waited for.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from outlast.atomic_files import draft_path, sync
from outlast.errors import StorageError
from outlast.health.memory import Memory

FILE = "check.json"
LOCK = "check.lock"
FILE_BYTES_MAX = 16 << 20
TRY_S = 0.02  # between two tries at the lock
ASIDE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Kept(NamedTuple):
    """`note`: why it was begun anew."""

    memory: Memory
    note: str = ""


@contextlib.contextmanager
def locked(directory: Path, within_s: float) -> Iterator[None]:
    """Nobody else has the directory meanwhile. Raises StorageError where it cannot be made or
    locked, others can write to it, or somebody does not let go of it in time."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        refuse_shared(directory)
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
                        f"another check has had the state directory {directory} for"
                        f" {within_s:.0f} s; nothing was written to it"
                    ) from None
                time.sleep(TRY_S)  # flock has no deadline of its own
        yield
    finally:
        os.close(lock)


def read(directory: Path) -> Kept:
    """A file that is missing, damaged or of another version begins anew, and says so."""
    path = directory / FILE
    try:
        refuse_shared(directory)
        with open(path, "rb", opener=_ours) as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return Kept(Memory(), f"{path} is not there yet: what comes of counters is known next time")
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}; nothing was written") from error
    try:
        if len(data) > FILE_BYTES_MAX:
            raise ValueError(f"larger than {FILE_BYTES_MAX:,} bytes")
        memory = msgspec.json.decode(data, type=Memory)
    except (ValueError, RecursionError) as error:
        return Kept(Memory(), f"{path} is damaged ({error}): what it knew is lost, and begun anew")
    if memory.version != Memory().version:
        return Kept(Memory(), f"{path} is of version {memory.version}, and begun anew")
    return Kept(memory)


def refuse_shared(directory: Path) -> None:
    """Raises StorageError for a directory that another user could have put there, or can write to;
    OSError where there is none."""
    found = directory.lstat()
    why = ""
    if stat.S_ISLNK(found.st_mode):
        why = "is a link: name the directory itself"
    elif found.st_uid not in {0, os.geteuid()}:
        why = f"belongs to another user ({found.st_uid})"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = "can be written by others: chmod go-w"
    elif open_ := [str(each) for each in directory.absolute().parents if _is_open(each)]:
        why = f"lies in {open_[0]}, where everybody can put another in its place"
    if why:
        raise StorageError(f"the state directory {directory} {why}; it was not used")


def _is_open(directory: Path) -> bool:
    mode = directory.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def _ours(path: str, _flags: int) -> int:
    """A file to read, which no link and no pipe is. Raises OSError."""
    file = os.open(path, os.O_RDONLY | ASIDE)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "is no file")
    return file


def write(directory: Path, memory: Memory) -> None:
    """Raises StorageError; then what was there before is as it was."""
    path = directory / FILE
    draft = draft_path(path)
    try:
        try:
            draft.write_bytes(msgspec.json.encode(memory))
            sync(draft)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"{path} could not be written: {error.strerror}; it is as it was"
        ) from error
