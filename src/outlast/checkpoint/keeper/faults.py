"""A disk that fails when told to: how tests kill, stop or starve a keeper at every step."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from outlast.checkpoint.keeper.disk import Disk


class Fault(msgspec.Struct, frozen=True):
    """Before the `nth` step named `step` (any, if empty) whose file's name contains `name`, do
    `action`: "kill", "hang", or fail with this error's name (ENOSPC). `attempts`: in how many
    keepers, one after the other, it happens."""

    action: str
    step: str = ""
    name: str = ""
    nth: int = 1
    attempts: int = 1


class WatchedDisk(Disk):
    """A disk that says each step, and the file's name, before it is taken."""

    def __init__(self, before: Callable[[str, str], None]) -> None:
        self._before = before
        self._names: dict[int, str] = {}

    def make_directory(self, path: Path) -> None:
        self._before("make_directory", path.name)
        super().make_directory(path)

    def create(self, path: Path) -> int:
        self._before("create", path.name)
        fd = super().create(path)
        self._names[fd] = path.name
        return fd

    def open(self, path: Path) -> int:
        self._before("open", path.name)
        fd = super().open(path)
        self._names[fd] = path.name
        return fd

    def read(self, fd: int, into: memoryview, at: int) -> None:
        self._before("read", self._names[fd])
        super().read(fd, into, at)

    def allocate(self, fd: int, size_bytes: int) -> None:
        self._before("allocate", self._names[fd])
        super().allocate(fd, size_bytes)

    def write(self, fd: int, data: memoryview, at: int) -> int:
        self._before("write", self._names[fd])
        return super().write(fd, data, at)

    def sync(self, fd: int) -> None:
        self._before("sync", self._names[fd])
        super().sync(fd)

    def rename(self, path: Path, to: Path) -> None:
        self._before("rename", to.name)
        super().rename(path, to)

    def link(self, path: Path, to: Path) -> None:
        self._before("link", to.name)
        super().link(path, to)

    def remove(self, path: Path) -> None:
        self._before("remove", path.name)
        super().remove(path)

    def sync_directory(self, path: Path) -> None:
        self._before("sync_directory", path.name)
        super().sync_directory(path)


class _Script:
    """Counts steps, from several threads, and acts on the ones that were named."""

    def __init__(self, faults: tuple[Fault, ...], attempt: int) -> None:
        self._left = {fault: fault.nth for fault in faults if attempt < fault.attempts}
        self._lock = threading.Lock()

    def before(self, step: str, name: str) -> None:
        due = []
        with self._lock:
            for fault in self._left:
                if fault.step in ("", step) and fault.name in name:
                    self._left[fault] -= 1
                    due += [fault.action] if self._left[fault] == 0 else []
        for action in due:
            if action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif action == "hang":
                threading.Event().wait()
            else:
                number = getattr(errno, action)
                raise OSError(number, os.strerror(number))


def disk_of(faults: tuple[Fault, ...], attempt: int) -> Disk:
    """The disk that an order asks for: the real one, unless a test wants it to fail."""
    return WatchedDisk(_Script(faults, attempt).before) if faults else Disk()
