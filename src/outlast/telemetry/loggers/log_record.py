"""Record of what a target has of a run, so that each step is logged once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from outlast.atomic_files import replace_file
from outlast.errors import RunDirError, UsageError

DIRECTORY = "loggers"


class LogRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Points that were given to a target: up to `step`, with `digest`.

    `incidents`: the number of the newest incident that was marked. What is up to `safe_step` and
    `safe_incidents` is there for certain. `writing`: a call has not ended.
    """

    version: int = 1
    target: str
    identity: str = ""
    step: int = -1
    digest: str = ""
    safe_step: int = -1
    incidents: int = 0
    safe_incidents: int = 0
    writing: bool = False


def record_path(run_dir: Path, target: str, name: str) -> Path:
    """Return the path of the record of a target and of a run's name there."""
    kind = re.sub(r"\W", "", target.partition(":")[0])
    digest = xxhash.xxh3_64_hexdigest(f"{target} {name}".encode())
    return run_dir / DIRECTORY / f"{kind}-{digest}.json"


def read_record(path: Path, target: str) -> LogRecord:
    """Return a record, or an empty one. Raises RunDirError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=LogRecord)
    except FileNotFoundError:
        return LogRecord(target=target)
    except (OSError, msgspec.DecodeError) as error:
        raise RunDirError(f"{path} cannot be read ({error}); nothing was logged") from error


def write_record(path: Path, record: LogRecord) -> None:
    """Write a record. Raises RunDirError."""
    try:
        replace_file(path, msgspec.json.encode(record))
    except OSError as error:
        raise RunDirError(f"{path} cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Hold the lock of a record. Raises UsageError where another process has it, RunDirError."""
    try:
        path.parent.mkdir(exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunDirError(f"{path.parent} cannot be written: {error.strerror or error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise UsageError(
            "another `outlast log` writes this run to this target; nothing was logged"
        ) from error
    finally:
        os.close(lock)
