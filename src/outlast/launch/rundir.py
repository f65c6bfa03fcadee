"""The run directory: one job's truth on disk, taken by one launcher at a time.

run.json      which job this is, and how many launchers it has had (terms)
lock          held by the launcher and its warden
events/       what happened (observe/store.py)
journal/      what the controller decided, durable before it was said
logs/RANK/WORKER/{stdout,stderr}.log; a spare's are in logs/spare/WORKER
checkpoints/  complete checkpoints
faults/       which --fault has fired
summary.json  written at the end of each launcher
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from pathlib import Path

import msgspec

from outlast.errors import RunDirError

VERSION = 1
FREE_BYTES_MIN = 64 << 20
_ROOMS = ("events", "journal", "logs", "checkpoints", "faults")
_POLL_S = 0.05


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """run.json: the job's identity. A later launcher must bring the same script and world."""

    version: int
    run: str
    script: str
    args: tuple[str, ...]
    world: int
    created_ns: int
    term: int


class RunDir:
    """A run directory that this process has taken. Not inherited by children unless passed."""

    def __init__(self, path: Path, job: Job, lock_fd: int, notes: tuple[str, ...]) -> None:
        self.path = path
        self.job = job
        self.lock_fd = lock_fd
        self.notes = notes  # what the owner should know about resuming here

    @property
    def resumed(self) -> bool:
        return self.job.term > 1

    def room(self, name: str) -> Path:
        return self.path / name

    def log_dir(self, seat: int, worker: str) -> Path:
        """Where a worker's output goes; made on first use. `seat` -1: a spare."""
        directory = self.path / "logs" / (str(seat) if seat >= 0 else "spare") / worker
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def seat_log(self, seat: int, worker: str) -> None:
        """A spare took a seat: its logs are found under the rank, too."""
        link = self.path / "logs" / str(seat) / worker
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(Path("..") / "spare" / worker)

    def release(self) -> None:
        os.close(self.lock_fd)


def take(path: Path, script: str, args: tuple[str, ...], world: int, wait_s: float = 5.0) -> RunDir:
    """Make or resume `path`. Waits up to `wait_s` for an earlier launcher's warden to finish.

    Raises RunDirError when it is in use, belongs to another job, cannot be written, or its disk
    is full; nothing in it has been changed then.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunDirError(
            f"run directory {path} cannot be written: {error.strerror}; nothing was started;"
            " choose another one with --run-dir"
        ) from error
    try:
        _lock(path, lock_fd, wait_s)
        free_bytes = shutil.disk_usage(path).free
        if free_bytes < FREE_BYTES_MIN:
            raise RunDirError(
                f"only {free_bytes >> 20} MiB are free under {path}, below the"
                f" {FREE_BYTES_MIN >> 20} MiB that events, journal and logs need; nothing was"
                " started; make room or choose another --run-dir"
            )
        job, notes = _identify(path, script, args, world)
        for room in _ROOMS:
            (path / room).mkdir(exist_ok=True)
        _write(path / "run.json", msgspec.json.format(msgspec.json.encode(job), indent=2))
    except OSError as error:
        os.close(lock_fd)
        raise RunDirError(f"run directory {path} cannot be written: {error.strerror}") from error
    except RunDirError:
        os.close(lock_fd)
        raise
    return RunDir(path, job, lock_fd, notes)


def place_logs(run_dir: RunDir, elsewhere: str | None) -> None:
    """Put logs/ under `elsewhere` (torchrun's --log-dir), a link in its place.

    Raises RunDirError when that cannot be written.
    """
    logs = run_dir.path / "logs"
    if elsewhere is None or logs.is_symlink():
        return
    target = Path(elsewhere).absolute() / f"{run_dir.path.name}_{run_dir.job.run}"
    try:
        target.mkdir(parents=True, exist_ok=True)
        logs.rmdir()  # fails, rightly, where an earlier term has left logs here
        logs.symlink_to(target)
    except OSError as error:
        raise RunDirError(
            f"--log-dir {elsewhere}: cannot keep this run's logs there ({error.strerror});"
            " nothing was started; leave it out, or name another place for a fresh run"
        ) from error


def _lock(path: Path, lock_fd: int, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        holder = os.pread(lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
        # A living holder will not let go; a dead one's warden will, as soon as it has cleaned up.
        if Path(f"/proc/{holder}").exists() or time.monotonic() > deadline:
            raise RunDirError(
                f"run directory {path} is in use by pid {holder}; nothing was started;"
                " wait for it, stop it, or choose another --run-dir"
            )
        time.sleep(_POLL_S)  # flock has no deadline of its own
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)


def _identify(
    path: Path, script: str, args: tuple[str, ...], world: int
) -> tuple[Job, tuple[str, ...]]:
    try:
        old = msgspec.json.decode((path / "run.json").read_bytes(), type=Job)
    except FileNotFoundError:
        job = Job(
            version=VERSION,
            run=secrets.token_hex(8),
            script=script,
            args=args,
            world=world,
            created_ns=time.time_ns(),
            term=1,
        )
        return job, ()
    except msgspec.DecodeError as error:
        raise RunDirError(
            f"{path / 'run.json'} cannot be read ({error}); nothing was started or changed;"
            " restore it or choose another --run-dir"
        ) from error
    for name, before, now in (
        ("format version", old.version, VERSION),
        ("script", old.script, script),
        ("world size", old.world, world),
    ):
        if before != now:
            raise RunDirError(
                f"run directory {path} belongs to another job: its {name} is {before}, not {now};"
                " nothing was changed; give that again, or choose another --run-dir"
            )
    notes: tuple[str, ...] = ()
    if old.args != args:
        notes = (
            f"resuming {path} with other script arguments: {' '.join(args) or '(none)'}"
            f" instead of {' '.join(old.args) or '(none)'}",
        )
    return msgspec.structs.replace(old, term=old.term + 1, args=args), notes


def _write(path: Path, data: bytes) -> None:
    """Replace a file whole, durably: a reader sees the old one or the new one."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
