"""Preservation of the job's files that a successor's start would overwrite.

A successor runs the script from its top in the middle of the run. If the top writes a file (a
control file that the loop reads, a log), the file would get its initial contents again. The job's
file is therefore moved aside before, and moved back before the script's next call of the session:

| time | NAME | .NAME.outlast |
|---|---|---|
| before the top opens, replaces or removes NAME | the job's file | |
| until the script protects its state, or begins a phase or the loop | the top's file | the job's |
| afterwards | the job's file | |

In a worker that joins a running job this begins above `outlast.init()`, where the job's files are
back when `init` is called. A first spare runs that code beside the first ranks, which do not wait:
it leaves the files alone, and names those that it has emptied. In a dry step, whose numbers are
made up, all files that the phase writes are treated so, and new ones are removed.

The lock on the moved file ends with its process. If the owner has died, the next worker that opens
NAME moves it back. Survivors that open NAME meanwhile wait for the job's file.

| descriptor of the top's file that the script has kept | afterwards |
|---|---|
| writes (a log) | writes at the end of the job's file |
| reads, or reads and writes | refers to the job's file if both are equal, else PhaseError |
| mapping of memory | stays, if both are equal and it cannot write, else PhaseError |

Seen by audit hooks: Python's `open`, `os.rename`, `os.replace` and `os.remove`, called by the
script's code or on its behalf; not what C++ opens (`torch.save` with a path). A file of the job
that the top renames (a rotated log) is left alone, with its target; so are symbolic links.

An audit hook cannot be removed, and each `id()` of the process calls it. A survivor therefore has
one only if its script could run on beside the start: not where it was inside an attempt that is
refused, and repeated behind the start.
"""

from __future__ import annotations

import fcntl
import filecmp
import os
import shutil
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.config import worker_settings
from outlast.errors import ConfigError, PhaseError
from outlast.worker.script.bytecode import is_call_of_script

if TYPE_CHECKING:
    from outlast.worker.script.repetitions import WriteNote

_POLL_S = 0.01
_LOCKED_BYTE = 1 << 62
_ADVICE = (
    "a replacement worker would continue with the initial contents; keep the contents in"
    " session.state, or do not truncate a file that exists"
)


class StartFiles:
    """Files of the job that this worker's start has moved aside."""

    def __init__(self, note: WriteNote | None, wait_s: float) -> None:
        """`note`: None above `init()`. `wait_s`: limit of another worker's start, in seconds."""
        self.note, self._wait_s = note, wait_s
        self._moved: dict[Path, int] = {}  # locked descriptors of the job's files
        self._written: set[Path] = set()  # files that this start has opened for writing
        self._new_files: set[Path] = set()  # new files of a dry step
        self._emptied: set[Path] = set()  # by a first spare
        self._is_watching = self._starts = self._guards = False
        self._acts = self._is_dry = self._lets_alone = False
        self.before_move: Callable[[], None] = lambda: None  # a hot spare waits for a seat
        self._pid = os.getpid()  # forked processes inherit the hook

    def begin(self, *, is_first: bool = False) -> None:
        """Begin to move files aside: the script runs from its top in the middle of the job.
        `is_first`: in a spare that starts with the job."""
        self._starts, self._lets_alone = True, is_first
        self._watch()

    def reach_init(self) -> None:
        """Move the job's files back when the script calls `init()`. Raises as `put_back` does."""
        self.put_back(for_good=True)
        if self._emptied and self.note:
            names = ", ".join(map(str, sorted(self._emptied)))
            self.note(
                f"code above outlast.init() writes {names}, and this spare runs that code as well,"
                " while ranks may already use the files; write them below init(), on one rank"
            )
        self._emptied.clear()

    @contextmanager
    def dry(self) -> Iterator[None]:
        """Undo what the script writes to files in here. Raises PhaseError as `put_back` does."""
        starts, self._starts, self._is_dry = self._starts, True, True
        self._watch()
        try:
            yield
        finally:
            self._is_dry = False
            try:
                self.put_back()
            finally:
                self._starts, new_files, self._new_files = starts, self._new_files, set()
                for path in new_files:
                    path.unlink(missing_ok=True)

    def guard(self, *, is_held: bool = False) -> None:
        """Make the script wait for the job's files from here on, since another worker may start.
        No-op if the script `is_held` until that start is over."""
        if not is_held:
            self._guards = True
            self._watch()

    def put_back(self, *, for_good: bool = False) -> None:
        """Move the job's files back. `for_good`: the script's loop begins, or its place in the job
        is reached.

        Raises PhaseError if a file cannot be moved back, or if this worker still reads its own
        version and that differs, or maps it writable.
        """
        moved, self._moved = self._moved, {}
        if for_good:
            self._starts = self._lets_alone = False
        if not moved:
            return
        self._acts = True
        try:
            refused = [
                f"{path} {why}" for path, fd in moved.items() if (why := _returned(path, fd))
            ]
        finally:
            self._acts = False
        if refused:
            raise PhaseError(f"{'; '.join(refused)}: {_ADVICE}")
        names = ", ".join(str(path) for path in moved)
        if self.note:
            text = (
                f"files that this worker's start overwrote have the job's contents again: {names}"
            )
            self.note(text, warning=False)

    def _watch(self) -> None:
        if not self._is_watching:
            self._is_watching = True
            paths, look = _PATHS, self._audit

            def hook(event: str, args: tuple[Any, ...]) -> None:  # called by each `id()`, too
                if event in paths:
                    look(event, args)

            sys.addaudithook(hook)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._acts or not (self._starts or self._guards):
            return
        name, replaces, writes = _PATHS[event](*args)
        replaces = replaces or (self._is_dry and writes and args[1] is not None)
        if name is None or (self._starts and not (replaces or writes)):
            return
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or os.getpid() != self._pid or not is_call_of_script():
            return
        self._acts = True
        try:
            self._look_at(event, args, _path(name, follow=event == "open"), replaces=replaces)
        finally:
            self._acts = False

    def _look_at(self, event: str, args: tuple[Any, ...], path: Path, *, replaces: bool) -> None:
        if self._starts and event == "open":
            self._written.add(path)
        if event != "open" and path.is_symlink():
            return
        if event == "os.rename" and self._starts:
            if _path(args[0], follow=False) not in self._written:
                self._forget(path)
                return
            self._written.add(path)
        if self._lets_alone:
            if replaces and path.exists():
                self._emptied.add(path)
        elif path not in self._moved and (replaces or not self._starts):
            self.before_move()
            self._await_return(path)
            if self._starts:
                self._move_aside(path, keeps_name=event != "open")
        if self._is_dry and event == "open":
            self._continue_dry(path, args[2])

    def _continue_dry(self, path: Path, flags: int) -> None:
        """Give a dry step a copy of the job's file, or note that it makes a new one."""
        if path in self._moved:
            if not flags & os.O_TRUNC and not path.exists():
                shutil.copyfile(_aside(path), path)
        elif not path.exists():
            self._new_files.add(path)

    def _forget(self, path: Path) -> None:
        """Delete a file that was moved aside: the script has renamed another file over it."""
        if (descriptor := self._moved.pop(path, None)) is not None:
            _aside(path).unlink(missing_ok=True)
            os.close(descriptor)

    def _move_aside(self, path: Path, *, keeps_name: bool) -> None:
        aside, descriptor = _aside(path), -1
        try:
            if not stat.S_ISREG(path.lstat().st_mode):
                return
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK))
            os.link(path, aside)  # of two workers, one succeeds
            if not keeps_name:
                path.unlink()
            self._moved[path] = descriptor
        except (FileExistsError, FileNotFoundError) as error:
            if isinstance(error, FileExistsError) or aside.exists():  # another start was first
                if descriptor >= 0:
                    os.close(descriptor)
                descriptor = -1
                self._await_return(path)
                self._move_aside(path, keeps_name=keeps_name)
        except OSError as error:
            raise PhaseError(
                f"the start of the script writes {path}, which cannot be moved aside ({error}) and"
                f" is unchanged: {_ADVICE}"
            ) from error
        finally:
            if descriptor >= 0 and path not in self._moved:
                os.close(descriptor)

    def _await_return(self, path: Path) -> None:
        """Wait while another worker keeps the file aside; move it back if that worker has died.
        Raises PhaseError after the time limit of a start."""
        aside, deadline = _aside(path), time.monotonic() + self._wait_s
        while aside.exists():
            if not _has_owner(aside):
                with suppress(FileNotFoundError):  # another worker has done it
                    aside.replace(path)
            elif time.monotonic() > deadline:
                raise PhaseError(f"{aside} was not moved back in {self._wait_s:.0f} s: {_ADVICE}")
            else:
                threading.Event().wait(_POLL_S)


_above_init: list[StartFiles] = []  # an audit hook lasts as long as its process


def watch_above_init() -> None:
    """Watch the script's code above `init()`, in a spare or a worker that joins a running job."""
    try:
        settings = worker_settings()
    except ConfigError:  # `init` raises it
        return
    # A process that the script has spawned has the same environment, but leads no session.
    if settings is None or _above_init or os.getsid(0) != os.getpid():
        return
    if settings.joins or settings.seat < 0:
        _above_init.append(StartFiles(None, settings.limits.join_s))
        _above_init[0].begin(is_first=not settings.joins)


def of_worker(note: WriteNote, wait_s: float) -> StartFiles:
    """Return the files of this process, whose `init` has been called."""
    files = _above_init.pop() if _above_init else StartFiles(note, wait_s)
    files.note = note
    return files


def _lock(kind: int) -> bytes:
    """Return a `struct flock` for a byte beyond the end of any file, which no script locks."""
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


def _path(name: Any, *, follow: bool) -> Path:
    """Return the absolute path of an audit event; `follow`: resolve its last part, too."""
    path = Path(os.fsdecode(name))
    return Path(os.path.realpath(path if follow else path.parent)) / ("" if follow else path.name)


def _opened(name: Any, mode: str | None, flags: int) -> tuple[Any, bool, bool]:
    writes = bool(flags & (os.O_WRONLY | os.O_RDWR))
    if isinstance(name, int) or (mode is None and not writes):
        return None, False, False
    # Libraries open locks and temporary files by `os.open`, which moves nothing aside.
    return name, mode is not None and bool(flags & os.O_TRUNC), writes


def _renamed(_: Any, name: Any, source_folder: int, folder: int) -> tuple[Any, bool, bool]:
    return (name if (source_folder, folder) == (-1, -1) else None), True, True


def _removed(name: Any, folder: int) -> tuple[Any, bool, bool]:
    return (name if folder == -1 else None), True, True


# By audit event: the path (None: ignored), whether its file is replaced, whether written.
_PATHS: dict[str, Callable[..., tuple[Any, bool, bool]]] = {
    "open": _opened,
    "os.rename": _renamed,
    "os.remove": _removed,
}


def _returned(path: Path, locked: int) -> str:
    """Move the job's file back and close its descriptor. Return the reason of a failure or ""."""
    try:
        return _put_back(path, locked)
    except OSError as error:
        return f"cannot be moved back from {_aside(path).name} ({error})"
    finally:
        os.close(locked)


def _put_back(path: Path, locked: int) -> str:
    """Move the job's file back to `path`. Return why the script cannot use it, or ""."""
    aside, why = _aside(path), ""
    try:
        new = path.stat()
    except FileNotFoundError:
        new = None
    if new is not None and os.path.samestat(
        new, os.fstat(locked)
    ):  # it was neither replaced nor removed
        aside.unlink()
        return ""
    descriptors = [] if new is None else _descriptors(new)
    mapped = "" if new is None else _mapping(new)
    reads = mapped or any(_access(fd) != os.O_WRONLY for fd in descriptors)
    is_equal = not reads or filecmp.cmp(aside, path, shallow=False)
    if "w" in mapped or not is_equal:
        why = f"was overwritten by the start of the script and is {'mapped' if mapped else 'open'}"
    aside.replace(path)
    for fd in descriptors if not why else ():
        _redirect(fd, path)
    return why


def _access(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE


def _descriptors(file: os.stat_result) -> list[int]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            is_same = os.path.samestat(os.fstat(int(entry.name)), file)
        except OSError:  # the descriptor of the listing itself
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
    """Make a descriptor of the top's file refer to the job's file."""
    access = _access(fd)
    if access == os.O_WRONLY:
        other = os.open(path, access | os.O_APPEND | os.O_CLOEXEC)
    else:
        other = os.open(path, access | os.O_CLOEXEC)
        os.lseek(other, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
    os.dup2(other, fd, inheritable=os.get_inheritable(fd))
    os.close(other)
