"""Ownership of a checkpoint directory: one job at a time, by a lock file with its owner.

    flock        owner's state        action
    free         any                  take
    busy         lives here           refuse, with its name
    busy         dead, keeper alive   wait until the keeper has finished
    busy         dead, keeper dead    take over: forked children of the dead hold the lock
    busy         on another host      wait shortly, then refuse
    unsupported  lives here           refuse, with its name
    unsupported  dead                 take over
    unsupported  on another host      take over after LEASE_S without a heartbeat

The token in the file is the fence: a keeper whose token is not in the file writes and commits
nothing. The token also detects a rank whose directory is not that of rank 0, and a renamed root.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from outlast.checkpoint.stores.chunk_reader import IoTimeout
from outlast.errors import CorruptionError, InUseError, StorageError

FILE = "owner.json"
LEASE_S = 60.0
_BEAT_S = 10.0
_ELSEWHERE_S = 30.0  # for the keeper of a dead trainer on another host
_POLL_S = 0.05
_SEEN_S = 15.0  # a network file system shows a new file late
_BYTES_MAX = 4096
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
OwnerState: TypeAlias = Literal["none", "here", "alive", "finishing", "dead", "elsewhere"]


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a directory. Processes are identified by pid and start time; pid 0 is none."""

    token: str = ""
    job: str = ""
    host: str = ""
    boot: str = ""
    namespace: str = ""
    pid: int = 0
    started: int = 0
    keeper: tuple[int, int] = (0, 0)

    @property
    def state(self) -> OwnerState:
        """Return the owner's state, as seen from this host."""
        if not self.token:
            return "none"
        if (self.boot, self.namespace) != _boot_and_namespace():
            return "elsewhere"
        if self.pid and _start_ticks(self.pid) == self.started:
            return "here" if self.pid == os.getpid() else "alive"
        pid, started = self.keeper
        return "finishing" if pid and _start_ticks(pid) == started else "dead"


class Ownership:
    """A directory that this process may save into, until `close` or its death."""

    def __init__(self, root: Path, owner: Owner, file: _File | None) -> None:
        """`file`: locked; None where the file system has no locks."""
        self._root, self._owner, self._file = root, owner, file
        self._closed = threading.Event()
        if file is None:
            threading.Thread(target=self._beat, name="owner", daemon=True).start()

    @property
    def token(self) -> str:
        """Return the token that identifies this owner."""
        return self._owner.token

    @property
    def fds(self) -> tuple[int, ...]:
        """Return the descriptors that the keeper inherits: they keep the lock until it ends."""
        return (self._file.fileno(),) if self._file else ()

    def keeper_is(self, pid: int) -> None:
        """Record the keeper that finishes pending writes if this process dies."""
        if pid != self._owner.keeper[0]:
            self._owner = msgspec.structs.replace(self._owner, keeper=(pid, _start_ticks(pid)))
            with suppress(OSError):  # it counts once this process is dead, and its lock is lost
                self._write(self._owner)

    def close(self) -> None:
        """Release the directory. No-op if it is released already."""
        if not self._closed.is_set():
            self._closed.set()
            with suppress(OSError):
                self._write(msgspec.structs.replace(self._owner, pid=0))
            if self._file:
                self._file.close()

    def _write(self, owner: Owner) -> None:
        if self._file:
            _rewrite(self._file, owner)
        elif read_owner(self._root).token == self.token:
            _replace(self._root, owner, lock=False)

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT_S):
            with suppress(OSError):  # the next save reports errors of the file system
                os.utime(self._root / FILE)


def take_ownership(root: Path, job: str, wait_s: float, patience: IoTimeout) -> Ownership:
    """Own `root`, which is created if missing.

    Waits at most `wait_s` for the keeper of a dead trainer. Raises InUseError naming the owner,
    StorageError where the directory cannot be written.
    """
    boot, namespace = _boot_and_namespace()
    mine = Owner(
        token=secrets.token_hex(8),
        job=job,
        host=socket.gethostname(),
        boot=boot,
        namespace=namespace,
        pid=os.getpid(),
        started=_start_ticks(os.getpid()),
    )
    begin, lease = time.monotonic(), _Lease()
    while True:
        try:
            result = patience.call(str(root / FILE), lambda: _attempt(root, mine, lease))
        except FileExistsError as error:
            leads = "is a link that leads nowhere" if root.is_symlink() else "is no directory"
            raise StorageError(
                f"{root} cannot be saved to: it {leads}; nothing was saved"
            ) from error
        except OSError as error:
            raise StorageError(
                f"{root} cannot be saved to: {error.strerror or error}; nothing was saved"
            ) from error
        if isinstance(result, Ownership):
            return result
        waited_s = time.monotonic() - begin
        most_s = {"finishing": wait_s, "none": _ELSEWHERE_S}
        if result.state == "elsewhere":
            most_s["elsewhere"] = _ELSEWHERE_S if lease.locks else 2 * LEASE_S
        if waited_s >= most_s.get(result.state, 0.0):
            raise InUseError(_refusal(root, result))
        time.sleep(_POLL_S)  # flock has no deadline of its own


def read_owner(root: Path) -> Owner:
    """Return the owner of `root`; one without a token if there is none, or it is unreadable."""
    try:
        with (root / FILE).open("rb") as file:
            return _decoded(file.read(_BYTES_MAX))
    except OSError:
        return Owner()


def check(root: Path, token: str) -> None:
    """Raise StorageError where `root` does not belong to the owner with `token` (any more)."""
    if not token or (owner := read_owner(root)).token == token:
        return
    if not owner.token:
        raise StorageError(
            f"{root} on {socket.gethostname()} is not the directory that rank 0 saves to"
            f" ({FILE} is not there): it is another host's own, not mounted, or was renamed; let"
            " all ranks save to one shared directory"
        )
    raise StorageError(f"{_owner(root, owner)} has taken it over; save to a directory of its own")


def wait_until_visible(root: Path, token: str, patience: IoTimeout) -> str:
    """Wait until this host shows the owner's file with `token`; return the error or ""."""
    due = time.monotonic() + _SEEN_S

    def look() -> str:
        with suppress(OSError):
            next(root.iterdir(), None)  # a network file system looks again then
        try:
            check(root, token)
        except StorageError as error:
            return str(error)
        return ""

    while (why := patience.call(str(root / FILE), look)) and time.monotonic() < due:
        time.sleep(_POLL_S)  # another host's file cannot be waited on
    return why


def wait_for_keeper(root: Path, wait_s: float, patience: IoTimeout) -> None:
    """Wait, at most `wait_s`, until the keeper of a dead trainer has written its saves."""
    due = time.monotonic() + wait_s
    where = str(root / FILE)
    while patience.call(where, lambda: read_owner(root)).state == "finishing":
        if time.monotonic() > due:
            return
        time.sleep(_POLL_S)  # it may be of another parent's: a lock would not be ours to take


class _Lease:
    """Duration for which an unreachable owner has not touched its file, by this clock."""

    def __init__(self) -> None:
        self.locks = True
        self._touched_ns, self._since = 0, 0.0

    def is_over(self, touched_ns: int) -> bool:
        """Return whether the file with this mtime was not touched for LEASE_S."""
        now = time.monotonic()
        if touched_ns != self._touched_ns:
            self._touched_ns, self._since = touched_ns, now
        return now - self._since > LEASE_S


class _File:
    """The owner's file; closed, and so unlocked, when this object is collected."""

    def __init__(self, path: Path) -> None:
        self._fd = -1
        self._fd = os.open(path, _FLAGS, 0o644)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close


def _attempt(root: Path, mine: Owner, lease: _Lease) -> Ownership | Owner:
    """Take the directory, or return its owner. Raises OSError."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / FILE
    file = _File(path)
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = _decoded(os.pread(file.fileno(), _BYTES_MAX, 0))
        touched_ns = os.fstat(file.fileno()).st_mtime_ns
        file.close()
        if error.errno in _NO_LOCKS:
            lease.locks = False
            over = owner.state == "elsewhere" and lease.is_over(touched_ns)
            if owner.state in ("none", "dead") or over:
                return Ownership(root, mine, _replace(root, mine, lock=False))
        elif error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        elif owner.state == "dead":
            return Ownership(root, mine, _replace(root, mine, lock=True))
        return owner
    owner = read_owner(root)
    with suppress(FileNotFoundError):
        is_same = os.path.samestat(os.fstat(file.fileno()), path.lstat())
        if is_same and owner.state != "finishing":
            _rewrite(file, mine)
            return Ownership(root, mine, file)
    file.close()  # its keeper has lost the lock; or it was taken over since we opened it
    return owner


def _replace(root: Path, owner: Owner, *, lock: bool) -> _File | None:
    """Replace a file that cannot be locked.

    Of two concurrent callers the later one owns; the fence stops the other.
    """
    draft = root / f".{FILE}.{owner.token}"
    file = _File(draft)
    if lock:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    _rewrite(file, owner)
    draft.rename(root / FILE)
    if lock:
        return file
    file.close()
    return None


def _rewrite(file: _File, owner: Owner) -> None:
    data = msgspec.json.encode(owner) + b"\n"
    os.pwrite(file.fileno(), data, 0)
    os.ftruncate(file.fileno(), len(data))
    os.fsync(file.fileno())


def _decoded(data: bytes) -> Owner:
    try:
        return msgspec.json.decode(data.partition(b"\n")[0] or b"{}", type=Owner)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Owner()  # it is being written


def _owner(root: Path, owner: Owner) -> str:
    job = f"job {owner.job!r}" if owner.job else "a job"
    return f"{root} is saved to by {job} (pid {owner.pid} on {owner.host})"


def _refusal(root: Path, owner: Owner) -> str:
    if owner.state == "here":
        return (
            f"{root} is saved to by another Checkpointer of this process; nothing was saved; close"
            " that one first"
        )
    return (
        f"{_owner(root, owner)}; nothing was saved; wait for it, stop it, or use a directory of its"
        f" own (its lock is {root / FILE})"
    )


@cache
def _boot_and_namespace() -> tuple[str, str]:
    """Return the boot id of this host, and the pid namespace of its processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, str(Path("/proc/self/ns/pid").readlink())
    except OSError as error:
        raise CorruptionError(f"/proc cannot be read ({error.strerror})") from error


def _start_ticks(pid: int) -> int:
    """Return a process's start time in kernel ticks; 0 if it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
