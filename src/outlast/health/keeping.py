"""The state directory: one file that is there whole or not at all, also for two checks at once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from outlast.drafts import draft_of, sync
from outlast.errors import StorageError
from outlast.health.memory import Memory

FILE = "check.json"
LOCK = "check.lock"
FILE_BYTES_MAX = 16 << 20
TRY_S = 0.02  # between two tries at the lock


class Kept(NamedTuple):
    """`note`: why it was begun anew."""

    memory: Memory
    note: str = ""


@contextlib.contextmanager
def locked(directory: Path, within_s: float) -> Iterator[None]:
    """Nobody else has the directory meanwhile. Raises StorageError where it cannot be made or
    locked, or somebody else does not let go of it in time."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
        with path.open("rb") as file:
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


def write(directory: Path, memory: Memory) -> None:
    """Raises StorageError; then what was there before is as it was."""
    path = directory / FILE
    draft = draft_of(path)
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
