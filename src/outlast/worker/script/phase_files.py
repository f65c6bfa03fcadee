"""Files as a script's state: what phases, and the code between them, read and write again.

A redo runs a phase's file operations a second time, and so does each rehearsal in a run without any
failure. A worker that joins in the middle of a batch repeats those of the code before its phase.

| the script's code opens one file                      | treatment                               |
|-------------------------------------------------------|-----------------------------------------|
| to read, then to write, in one attempt at a phase     | refused by name                         |
| to append, in a phase                                 | reported once: lines occur per attempt  |
| to read, then to write, between two phases            | reported once                           |
| to write anew (by a phase: once an attempt)           | none: the last attempt's contents stay  |

Seen by an audit hook, which is added where the code that can run names an operation on files: each
event of the interpreter costs a fraction of a microsecond from then on. Not seen: files that C++
opens, that were opened before, or that other threads and processes open.
"""

from __future__ import annotations

import os
import sys
import threading
import types
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from outlast.worker.script.bytecode import is_call_of_script, names_of, saves_by_path
from outlast.worker.script.reachable_values import ReachableCode
from outlast.worker.script.value_paths import own_frames

_OPERATIONS = {
    *("open", "read_text", "read_bytes", "write_text", "write_bytes", "load", "save"),
    *("loadtxt", "savetxt", "fromfile", "tofile", "read_csv", "to_csv"),
}
_USES_MAX = 1000  # files of one attempt
_KEEP = "keep its contents in session.state, or derive them from session.step_index"


class PhaseFiles:
    """Files that the attempt under way, or the code since the last phase, has opened.

    `refuse` gets what is wrong and a remedy; `tell` gets a text, and reports it once.
    """

    def __init__(self, refuse: Callable[[str, str], None], tell: Callable[[str], None]) -> None:
        self._refuse, self._tell = refuse, tell
        self._read: set[str] = set()
        self._rewritten: set[str] = set()  # read before
        self._appended: set[str] = set()
        self._is_watching = self._is_full = False
        self._pid = os.getpid()

    def watch(self, codes: Iterable[ReachableCode]) -> None:
        """Watch if code of the script names an operation on files."""
        if not self._is_watching and any(
            _OPERATIONS & (each.names.attributes | each.names.outer) for each in codes
        ):
            self._is_watching = True
            sys.addaudithook(self._audit)

    def end_attempt(self, name: str) -> None:
        """End an attempt at phase `name`. Raises PhaseError for a file that it has updated."""
        updated, appended = sorted(self._rewritten), sorted(self._appended)
        if self._is_full:
            self._tell(f"{name} opens more than {_USES_MAX} files; only the first ones are watched")
        self.forget()
        for path in appended:
            self._tell(
                f"{name} appends to {path}: lines are appended once per attempt, including the"
                " rehearsals of the first step; append between phases"
            )
        for path in updated:
            self._refuse(f"{name} reads {path} and then writes it", _KEEP)

    def end_between(self) -> None:
        """End the code between two phases."""
        updated = sorted(self._rewritten)
        self.forget()
        for path in updated:
            self._tell(
                f"code between phases reads {path} and then writes it: a worker that joins in the"
                f" middle of a batch may repeat that; {_KEEP}"
            )

    def forget(self) -> None:
        """Forget what was opened."""
        for paths in (self._read, self._rewritten, self._appended):
            paths.clear()

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and args[1] is not None:  # not by `os.open`, as locks are
            self._opened(args[0], args[2])
        elif event == "os.rename" and args[2:] == (-1, -1):
            self._opened(args[1], os.O_WRONLY | os.O_TRUNC)

    def _opened(self, name: Any, flags: int) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if (
            isinstance(name, int)
            or not is_main
            or os.getpid() != self._pid
            or not is_call_of_script()
        ):
            return
        with suppress(OSError, ValueError):  # opening it fails as well
            path = os.path.realpath(os.fsdecode(name))
            if not Path(path).is_file():
                return
            if len(self._read) + len(self._appended) + len(self._rewritten) >= _USES_MAX:
                self._is_full = True
                return
            access = flags & os.O_ACCMODE
            if flags & os.O_APPEND:
                self._appended.add(path)
            elif access != os.O_RDONLY and (path in self._read or not flags & os.O_TRUNC):
                self._rewritten.add(path)  # to read and write at once, too
            if access != os.O_WRONLY:
                self._read.add(path)


def top_saves_by_path() -> bool:
    """Return whether the script's code that has run, or a function that it names, calls
    `torch.save` and opens no file."""
    for frame in own_frames():
        code, until = frame.f_code, frame.f_lasti
        read = names_of(code, frozenset(range(until))).outer
        called = (frame.f_globals.get(name) for name in read)
        codes = [each.__code__ for each in called if isinstance(each, types.FunctionType)]
        if saves_by_path(code, until) or any(map(saves_by_path, codes)):
            return True
    return False
