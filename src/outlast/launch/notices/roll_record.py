"""State of `outlast roll` in RUN_DIR/roll, from which the same command goes on.

lock     held by the command that runs
record   the hosts, and how far each is
cancel   written by `outlast roll RUN_DIR --cancel`; its content is of no account
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from outlast.atomic_files import replace_file
from outlast.errors import RunDirError

FOLDER = "roll"
_RECORD, _LOCK, _CANCEL = "record", "lock", "cancel"
BYTES_MAX = 64 << 20


class RollingHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host on its way. `pending`: its turn has not come; `leaving`: it was asked to leave;
    `away`: it has left; `back`: `successor`, itself or a fresh host, has joined the run.

    `releases`: how often it had left before; `workers`: of this host, and `known`: all hosts of the
    run, when it was asked."""

    host: str
    state: Literal["pending", "leaving", "away", "back"] = "pending"
    successor: str = ""
    releases: int = 0
    workers: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    ranks: int = 0  # that moved
    n: int = -1  # the phase before which they moved; -1: none did
    move_s: float = 0.0  # from the request until they had moved
    leave_s: float = 0.0  # from the request until it had left
    away_s: float = 0.0  # until a host had joined in its place, as long as a command waited


class RollRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts that leave a run and come back in turn. `driver`: the command that runs."""

    run: str
    driver: str
    is_all: bool
    hosts: tuple[RollingHost, ...]

    def with_host(self, host: RollingHost) -> RollRecord:
        """Return the record with a newer state of a host."""
        hosts = tuple(host if each.host == host.host else each for each in self.hosts)
        return replace(self, hosts=hosts)

    def names(self, *states: str) -> list[str]:
        """Return the hosts in these states, in the order of the record."""
        return [each.host for each in self.hosts if each.state in states]


def read(run_dir: Path) -> RollRecord | None:
    """Return the record of a roll that has not ended; None without one. Raises RunDirError."""
    path = run_dir / FOLDER / _RECORD
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(BYTES_MAX), type=RollRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise RunDirError(
            f"{path} cannot be read ({error}); nothing was requested; 'outlast roll {run_dir}"
            " --cancel' removes it, and the next roll begins anew"
        ) from error


def write(run_dir: Path, record: RollRecord) -> None:
    """Write the record, unless another command drives the roll now. Raises RunDirError."""
    before = read(run_dir)
    if before is not None and before.driver != record.driver:
        raise RunDirError(f"another command has gone on with this roll ({before.driver})")
    adopt(run_dir, record)


def adopt(run_dir: Path, record: RollRecord) -> None:
    """Write the record as that of a new driver. Raises RunDirError."""
    with _written(run_dir):
        (run_dir / FOLDER).mkdir(exist_ok=True)
        replace_file(run_dir / FOLDER / _RECORD, msgspec.json.encode(record))


def remove(run_dir: Path) -> None:
    """Forget the roll, and the request to cancel it. Raises RunDirError."""
    with _written(run_dir):
        for name in (_RECORD, _CANCEL):
            (run_dir / FOLDER / name).unlink(missing_ok=True)


def request_cancel(run_dir: Path) -> None:
    """Ask the command that runs to end. Raises RunDirError."""
    with _written(run_dir):
        (run_dir / FOLDER / _CANCEL).touch()


def is_cancelled(run_dir: Path) -> bool:
    """Return whether the roll is to end."""
    return (run_dir / FOLDER / _CANCEL).exists()


def exists(run_dir: Path) -> bool:
    """Return whether there is a record, a readable one or not."""
    return (run_dir / FOLDER / _RECORD).exists()


@contextlib.contextmanager
def lock(run_dir: Path) -> Iterator[bool]:
    """Hold the lock of rolls; yield whether it was free. Raises RunDirError."""
    with _written(run_dir):
        (run_dir / FOLDER).mkdir(exist_ok=True)
        lock_fd = os.open(run_dir / FOLDER / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        is_free = True
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise RunDirError(
                    f"{run_dir / FOLDER} cannot be locked: {error.strerror}"
                ) from error
            is_free = False
        yield is_free
    finally:
        os.close(lock_fd)


@contextlib.contextmanager
def _written(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirError(
            f"{run_dir / FOLDER} cannot be written ({error.strerror}); nothing was requested"
        ) from error
