"""Run directory: the files of one job, locked by one launcher at a time.

run.json      identity of the job (launch/terms/run_identity.py)
plan.json     plan of the newest launcher (launch/torchrun_arguments.py)
hosts/NAME/lock  held by the agent of a node without the controller, and by its reaper
lock          held by the launcher and its reaper; has the pid, and whether SIGUSR1 requests saves
events/       events (telemetry/event_store.py)
journal/      decisions of the controller, durable before they are sent
logs/RANK/WORKER/{stdout,stderr}.log; a spare's are in logs/spare/WORKER
checkpoints/  complete checkpoints
faults/       markers of injected --fault
summary.json  written at the end of each launcher
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from outlast.atomic_files import replace_file
from outlast.errors import RunDirError
from outlast.launch.host.reaper import SWEEP_S, read_process_stat
from outlast.launch.terms.run_identity import CHECKPOINTS, RunningJob, identify

FREE_BYTES_MIN = 64 << 20
_ROOMS = ("events", "journal", "logs", CHECKPOINTS, "faults")
LOCK_S = SWEEP_S + 5.0  # the reaper of a dead launcher may still hold the lock
_POLL_S = 0.05
_SAVES = "saves"


class RunDir:
    """Run directory locked by this process; children inherit the lock only if it is passed."""

    def __init__(self, path: Path, job: RunningJob, lock_fd: int, notes: tuple[str, ...]) -> None:
        self.path = path
        self.job = job
        self.lock_fd = lock_fd
        self.lock_fds: tuple[int, ...] = (lock_fd,)  # locks that the reaper keeps
        self.notes = notes  # notes for the owner about resuming

    @property
    def resumed(self) -> bool:
        """Return whether an earlier launcher used this directory."""
        return self.job.term > 1

    def room(self, name: str) -> Path:
        """Return the path of a subdirectory."""
        return self.path / name

    @property
    def checkpoints(self) -> Path:
        """Return the directory of checkpoints, which all hosts of the run see."""
        return Path(self.job.home) if self.job.home else self.path / CHECKPOINTS

    def log_dir(self, seat: int, worker: str) -> Path:
        """Return the directory of a worker's output; create it if missing. `seat` -1: a spare."""
        directory = self.path / "logs" / (str(seat) if seat >= 0 else "spare") / worker
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def seat_log(self, seat: int, worker: str) -> None:
        """Link the logs of a spare that took a seat under its rank."""
        link = self.path / "logs" / str(seat) / worker
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(Path("..") / "spare" / worker)

    def tell_saves(self, saves: bool) -> None:
        """Record in the lock whether SIGUSR1 requests a checkpoint from this launcher.

        If this write fails, `outlast ckpt now` cannot send requests; nothing else is affected.
        """
        with contextlib.suppress(OSError):
            os.pwrite(self.lock_fd, lock_words(saves), 0)

    def adopt(self, run: str, term: int, home: str | None = None) -> None:
        """Continue the job `run` of another directory, in `term` or the current term if later.
        `home`: see RunningJob; None leaves it.

        Raises RunDirError if run.json cannot be written.
        """
        home = self.job.home if home is None else home
        term = max(term, self.job.term)
        self.job = msgspec.structs.replace(self.job, run=run, term=term, home=home)
        try:
            replace_file(self.path / "run.json", msgspec.json.format(msgspec.json.encode(self.job)))
        except OSError as error:
            raise RunDirError(
                f"run directory {self.path} cannot be written: {error.strerror}; nothing was"
                " started"
            ) from error

    def release(self) -> None:
        """Release the lock."""
        os.close(self.lock_fd)


def lock_host(path: Path, host: str, wait_s: float = LOCK_S) -> int:
    """Lock this host's part of a run of several nodes; return the lock's descriptor.

    Waits up to `wait_s` for the reaper of an earlier agent. Raises RunDirError if an agent of this
    host takes part in the run, or the directory cannot be written.
    """
    own = path / "hosts" / host
    try:
        own.mkdir(parents=True, exist_ok=True)
        lock_fd = os.open(own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunDirError(
            f"{host}: run directory {path} cannot be written: {error.strerror}; nothing was started"
        ) from error
    try:
        _lock(own, lock_fd, wait_s)
    except BaseException:
        os.close(lock_fd)
        raise
    return lock_fd


def unlock(lock_fd: int) -> None:
    """Release a host's lock."""
    os.close(lock_fd)


def of_node(path: Path, run: str, term: int, lock_fd: int) -> RunDir:
    """Return the run directory for a node that does not hold the controller.

    Raises RunDirError if run.json is missing or of another run or term.
    """
    try:
        job = msgspec.json.decode((path / "run.json").read_bytes(), type=RunningJob)
    except (OSError, msgspec.DecodeError) as error:
        raise RunDirError(f"{path / 'run.json'} cannot be read ({error})") from error
    return RunDir(path, msgspec.structs.replace(job, run=run, term=term), lock_fd, ())


def of_own_host(path: Path, job: RunningJob, lock_fd: int) -> RunDir:
    """Return the run directory of a host whose run directory is its own; make what it lacks.

    Raises RunDirError if it cannot be written.
    """
    run_dir = RunDir(path, job, lock_fd, ())
    try:
        for room in _ROOMS:
            (path / room).mkdir(exist_ok=True)
    except OSError as error:
        raise RunDirError(f"run directory {path} cannot be written: {error.strerror}") from error
    run_dir.adopt(job.run, job.term)
    return run_dir


class LockHolder(NamedTuple):
    """Live launcher of a run, according to its lock.

    `started` distinguishes it from a later process with the same pid; `saves`: SIGUSR1 requests a
    checkpoint.
    """

    pid: int
    started: int
    saves: bool


def holder(path: Path) -> LockHolder | None:
    """Return the live process of this host that holds the run directory, or None; read-only.

    Raises RunDirError if `path` is no run directory or its lock cannot be read.
    """
    try:
        words = (path / "lock").read_text(errors="replace").split()
    except OSError as error:
        raise RunDirError(
            f"{path} is no run directory, or cannot be read ({error.strerror}); give the directory"
            " that `outlast run` printed at its start"
        ) from error
    if len(words) < 2 or not words[1].isdigit() or not _is_alive(words):
        return None
    return LockHolder(int(words[0]), int(words[1]), _SAVES in words)


def is_held(path: Path) -> bool:
    """Return whether the run is locked; read-only.

    The holder is a launcher on this or another host with the same file system and locks, or the
    reaper of a dead launcher. Raises RunDirError if the lock file cannot be read; without a lock
    file, the run is not held.
    """
    try:
        lock_fd = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise RunDirError(f"{path / 'lock'} cannot be read ({error.strerror})") from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return True
    finally:
        os.close(lock_fd)
    return holder(path) is not None  # for file systems without locks


def take(
    path: Path, script: str, args: tuple[str, ...], world: int, wait_s: float = LOCK_S
) -> RunDir:
    """Create or resume `path`; wait up to `wait_s` for an earlier launcher's reaper to finish.

    Raises RunDirError if it is in use, belongs to another job, cannot be written, or its disk is
    full; an earlier job's files are then unchanged (`path` and its lock may be new).
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        reason = "it is not a directory" if error.errno == errno.EEXIST else error.strerror
        raise RunDirError(
            f"run directory {path} cannot be written: {reason}; nothing was started; choose another"
            " one with --run-dir"
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
        job, notes = identify(path, script, args, world)
        for room in _ROOMS:
            (path / room).mkdir(exist_ok=True)
        replace_file(path / "run.json", msgspec.json.format(msgspec.json.encode(job), indent=2))
    except OSError as error:
        os.close(lock_fd)
        raise RunDirError(f"run directory {path} cannot be written: {error.strerror}") from error
    except RunDirError:
        os.close(lock_fd)
        raise
    return RunDir(path, job, lock_fd, notes)


def place_logs(run_dir: RunDir, elsewhere: str | None, run_id: str) -> None:
    """Move logs/ below `elsewhere` (torchrun's --log-dir), to a directory whose name begins with
    the run id as torchrun's, and leave a symbolic link. Each host of several makes it, perhaps as
    its own. Raises RunDirError on failure."""
    logs = run_dir.path / "logs"
    if elsewhere is None:
        return
    target = Path(elsewhere).absolute() / f"{run_id.replace(os.sep, '-')}_{run_dir.job.run}"
    try:
        has_link = logs.is_symlink()  # of an earlier term, or of the controller's node
        (logs.readlink() if has_link else target).mkdir(parents=True, exist_ok=True)
        if not has_link:
            logs.rmdir()  # fails, as intended, if an earlier term has logs here
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
        words = os.pread(lock_fd, 64, 0).decode(errors="replace").split()
        # A live launcher keeps the lock; the reaper of a dead launcher releases it later.
        if _is_alive(words):
            raise RunDirError(
                f"run directory {path} is in use by pid {words[0]}; nothing was started;"
                " wait for it, stop it, or choose another --run-dir"
            )
        if time.monotonic() > deadline:
            raise RunDirError(
                f"run directory {path} is held, and its launcher (pid {' '.join(words[:1])}) is"
                " not alive on this host: its processes are still being killed, or it runs on"
                " another host or in another container; nothing was started; try again when its"
                " processes have ended, or choose another --run-dir"
            )
        time.sleep(_POLL_S)  # flock has no timeout
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, lock_words(saves=False), 0)


def lock_words(saves: bool) -> bytes:
    """Return the lock's content; its fixed length makes updates atomic for readers."""
    us = read_process_stat(os.getpid())
    word = _SAVES if saves else ""
    return f"{os.getpid()} {us.started if us else ''} {word:{len(_SAVES)}}\n".encode()


def _is_alive(words: list[str]) -> bool:
    """Return whether pid and start time in the lock belong to a live process."""
    if not words or not words[0].isdigit():
        return False
    stat = read_process_stat(int(words[0]))
    return (
        stat is not None
        and stat.state not in "ZX"
        and (len(words) < 2 or words[1] == str(stat.started))
    )


SAVE_SIGNAL = signal.SIGUSR1
SAVE_REFUSED = "SIGUSR1: nothing here could be saved yet"  # the launcher's note


@contextlib.contextmanager
def ignore_save_signal() -> Iterator[None]:
    """Ignore SAVE_SIGNAL, which a scheduler may send while a launcher starts or ends."""
    before = signal.getsignal(SAVE_SIGNAL)
    if before is signal.SIG_DFL:
        signal.signal(SAVE_SIGNAL, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(SAVE_SIGNAL, before)


def request_save_by_signal(run_dir: Path) -> int:
    """Send SAVE_SIGNAL to the launcher of `run_dir`; return its pid. Its events have the result.

    Not sent to a process that does not handle it. Raises RunDirError if no launcher runs.
    """
    launcher = holder(run_dir)
    if launcher is None:
        raise RunDirError(
            f"{run_dir}: its launcher does not run on this host, so that no checkpoint can be"
            " requested; the same `outlast run` command resumes the run"
        )
    if not launcher.saves:
        raise RunDirError(
            f"{run_dir}: its launcher (pid {launcher.pid}) accepts no requests: it is starting or"
            " ending, or SIGUSR1 is one of its --signals-to-handle; no checkpoint was requested"
        )
    try:
        process = os.pidfd_open(launcher.pid)
        try:
            now = read_process_stat(launcher.pid)
            if now is None or now.started != launcher.started:
                raise ProcessLookupError
            signal.pidfd_send_signal(process, SAVE_SIGNAL)
        finally:
            os.close(process)
    except ProcessLookupError as error:
        raise RunDirError(f"{run_dir}: its launcher (pid {launcher.pid}) has just ended") from error
    except PermissionError as error:
        raise RunDirError(
            f"{run_dir}: its launcher (pid {launcher.pid}) belongs to another user; no checkpoint"
            " was requested; repeat as that user"
        ) from error
    return launcher.pid
