"""Files that a successor's start writes anew, kept as the job has left them.

A successor runs the script from its top in the middle of the run. Where the top writes a file (a
control file that the loop reads, a log), the file would hold its first contents again. The job's
file is therefore moved aside before, and moved back before the script's next call of the session:

| time | NAME | .NAME.outlast |
|---|---|---|
| before the top opens, replaces or removes NAME | the job's file | |
| until the script protects its state, or begins a phase or the loop | the top's file | the job's |
| afterwards | the job's file | |

The lock on the moved file ends with its process: where the owner has died, the next worker that
opens NAME moves it back. Survivors that open NAME meanwhile wait for the job's file.

| descriptor of the top's file that the script has kept | afterwards |
|---|---|
| writes (a log) | writes at the end of the job's file |
| reads, or reads and writes | refers to the job's file if both are equal, else PhaseError |
| mapping of memory | stays, if both are equal and it cannot write, else PhaseError |

Seen by audit hooks: Python's `open`, `os.rename`, `os.replace` and `os.remove`, called by the
script's code or on its behalf; not what C++ opens (`torch.save` with a path).
"""

from __future__ import annotations

import fcntl
import filecmp
import os
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from outlast.errors import PhaseError
from outlast.worker.script.script_variables import WriteNote
from outlast.worker.script.value_paths import is_own_file

_POLL_S = 0.01
_LOCKED_BYTE = 1 << 62
_ADVICE = (
    "a replacement worker would go on with its first contents; keep them in session.state, or open"
    " the file without emptying it where it exists"
)


class StartFiles:
    """Files of the job that this worker's start has moved aside."""

    def __init__(self, note: WriteNote, wait_s: float) -> None:
        """`wait_s`: budget of another worker's start."""
        self._note, self._wait_s = note, wait_s
        self._moved: dict[Path, int] = {}  # locked descriptors of the job's files
        self._is_watching = self._starts = self._guards = False
        self._acts = False
        self._pid = os.getpid()  # processes that the script forks have the hook, too

    def begin(self) -> None:
        """The script is run from its top in the middle of the job."""
        self._starts = True
        self._watch()

    def guard(self) -> None:
        """Another worker may start from now on: wait for the job's files before using them."""
        self._guards = True
        self._watch()

    def put_back(self) -> None:
        """Move the job's files back. Raises PhaseError for a file that this worker reads by a
        descriptor or a mapping of its own, and that has changed since the job's start."""
        if not self._moved:
            return
        moved, self._moved = self._moved, {}
        self._acts = True
        try:
            refused = [
                f"{path} {why}" for path, fd in moved.items() if (why := _put_back(path, fd))
            ]
        finally:
            self._acts = False
        if refused:
            raise PhaseError(f"the start of the script {'; '.join(refused)}: {_ADVICE}")
        names = ", ".join(str(path) for path in moved)
        text = f"files that this worker's start wrote anew are as the job left them: {names}"
        self._note(text, warning=False)

    def end(self) -> None:
        """The script's loop begins, or its place in the job is reached."""
        self.put_back()
        self._starts = False

    def _watch(self) -> None:
        if not self._is_watching:
            self._is_watching = True
            sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in _PATHS or self._acts or not (self._starts or self._guards):
            return
        name, replaces = _PATHS[event](*args)
        if name is None or (self._starts and not replaces):
            return
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or os.getpid() != self._pid or not _is_scripts():
            return
        self._acts = True
        try:
            path = Path(os.path.realpath(os.fsdecode(name)))
            if path not in self._moved:
                self._await_return(path)
                if self._starts:
                    self._move_aside(path, keeps_name=event != "open")
        finally:
            self._acts = False

    def _move_aside(self, path: Path, *, keeps_name: bool) -> None:
        aside = _aside(path)
        try:
            if not stat.S_ISREG(path.lstat().st_mode):
                return
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK))
            os.link(path, aside)  # of two workers, one succeeds
            if not keeps_name:
                path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            raise PhaseError(
                f"the start of the script writes {path}, which cannot be moved aside ({error}):"
                f" {_ADVICE}"
            ) from error
        self._moved[path] = descriptor

    def _await_return(self, path: Path) -> None:
        """Wait until no other worker has moved the file aside; move it back where that worker has
        died. Raises PhaseError after the budget of a start."""
        aside, deadline = _aside(path), time.monotonic() + self._wait_s
        while aside.exists():
            if not _has_owner(aside):
                with suppress(FileNotFoundError):  # another worker has done it
                    aside.replace(path)
            elif time.monotonic() > deadline:
                raise PhaseError(f"{path} is still {aside} after {self._wait_s:.0f} s: {_ADVICE}")
            else:
                threading.Event().wait(_POLL_S)


def _lock(kind: int) -> bytes:
    """Return a `struct flock` for a byte behind the end of every file, which no script locks."""
    return struct.pack("@hhqqi4x", kind, os.SEEK_SET, _LOCKED_BYTE, 1, 0)


def _has_owner(aside: Path) -> bool:
    try:
        descriptor = os.open(aside, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK))
    finally:
        os.close(descriptor)
    return struct.unpack("@hhqqi4x", found)[0] != fcntl.F_UNLCK


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.outlast")


def _opened(name: Any, mode: str | None, flags: int) -> tuple[Any, bool]:
    if mode is None or isinstance(name, int):  # os.open: locks and temporary files of libraries
        return None, False
    return name, bool(flags & os.O_TRUNC)


def _renamed(_: Any, name: Any, __: int, folder: int) -> tuple[Any, bool]:
    return (name if folder == -1 else None), True


def _removed(name: Any, folder: int) -> tuple[Any, bool]:
    return (name if folder == -1 else None), True


# By audit event: the path (None: not looked at), and whether its file is replaced.
_PATHS: dict[str, Callable[..., tuple[Any, bool]]] = {
    "open": _opened,
    "os.rename": _renamed,
    "os.remove": _removed,
}


def _is_scripts() -> bool:
    """Return whether the script's code called what is under way, other than by an import."""
    frame = sys._getframe(2)  # noqa: SLF001 - an audit hook has no other way to its caller
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith("<frozen importlib"):
            return False
        if is_own_file(name):
            return True
        frame = frame.f_back
    return False


def _put_back(path: Path, locked: int) -> str:
    """Move the job's file back to `path`. Return why the script cannot go on with it, else ""."""
    aside, why = _aside(path), ""
    try:
        new = path.stat()
    except FileNotFoundError:
        new = None
    if new is not None and os.path.samestat(
        new, os.fstat(locked)
    ):  # it was neither replaced nor removed
        aside.unlink()
        os.close(locked)
        return ""
    descriptors = [] if new is None else _descriptors(new)
    mapped = "" if new is None else _mapping(new)
    reads = mapped or any(_access(fd) != os.O_WRONLY for fd in descriptors)
    is_equal = not reads or filecmp.cmp(aside, path, shallow=False)
    if "w" in mapped or not is_equal:
        why = f"keeps {path.name} {'mapped' if mapped else 'open'} that it wrote anew"
    aside.replace(path)
    for fd in descriptors if not why else ():
        _redirect(fd, path)
    os.close(locked)
    return why


def _access(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE


def _descriptors(file: os.stat_result) -> list[int]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            is_same = os.path.samestat(os.fstat(int(entry.name)), file)
        except OSError:  # that of the listing itself
            continue
        if is_same:
            found.append(int(entry.name))
    return found


def _mapping(file: os.stat_result) -> str:
    """Return the permissions of a mapping of the file, "" for none."""
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}"
    permissions = ""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        if fields[3] == device and int(fields[4]) == file.st_ino:
            is_shared = fields[1].endswith("s")
            permissions += fields[1] if is_shared else "r"
    return permissions


def _redirect(fd: int, path: Path) -> None:
    """Make a descriptor of the top's file one of the job's file."""
    access = _access(fd)
    if access == os.O_WRONLY:
        other = os.open(path, access | os.O_APPEND | os.O_CLOEXEC)
    else:
        other = os.open(path, access | os.O_CLOEXEC)
        os.lseek(other, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
    os.dup2(other, fd, inheritable=os.get_inheritable(fd))
    os.close(other)
