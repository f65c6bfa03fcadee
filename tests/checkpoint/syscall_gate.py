"""Gate for file system calls by seccomp: calls hang, fail, or kill their process.

What happens is real: a call that is held sleeps in the kernel, as on a network file system whose
server is gone, and only SIGKILL ends it (before Linux 5.19: any signal). It needs no rights and no
mount: seccomp asks a supervisor about each call. A thread goes behind the gate by itself; threads
and processes that it starts are behind it, too; there is no way out.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import pytest

# By machine: the audit number of the architecture, seccomp, and calls by name. Those at the end of
# the names' lists are only what the C library may use in place of others.
_MACHINES = {
    "x86_64": (0xC000003E, 317, {
        "open": (2, 257), "read": (0, 17, 295, 327), "list": (217,), "stat": (262, 332),
        "write": (1, 18), "sync": (74, 75), "allocate": (285,), "truncate": (77,),
        "rename": (82, 264, 316), "link": (86, 265), "remove": (84, 87, 263), "mkdir": (83, 258),
    }),
    "aarch64": (0xC00000B7, 277, {
        "open": (56,), "read": (63, 67, 69, 286), "list": (61,), "stat": (79, 291),
        "write": (64, 68), "sync": (82, 83), "allocate": (47,), "truncate": (46,),
        "rename": (38, 276), "link": (37,), "remove": (35,), "mkdir": (34,),
    }),
}  # fmt: skip
_BY_PATH = {2, 82, 86, 84, 87, 83}  # x86's calls whose first argument is a path
_BY_FD = {"read", "list", "write", "sync", "allocate", "truncate"}
CHANGES = ("open", "write", "sync", "allocate", "truncate", "rename", "link", "remove", "mkdir")
_ALLOW, _ASK, _LISTEN, _KILLABLE, _GO_ON = 0x7FFF0000, 0x7FC00000, 1 << 3, 1 << 5, 1
_PR_SET_NO_NEW_PRIVS, _SET_FILTER = 38, 1
_ASKED = struct.Struct("<QIIiIQ6Q")
_ANSWER = struct.Struct("<QqiI")
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_PATH_BYTES = 4096
_libc = ctypes.CDLL(None, use_errno=True)


class Seen(NamedTuple):
    """A system call behind the gate. `path`: the first file that it names."""

    step: str
    path: str
    pid: int
    writes: bool  # of an open: whether it creates or is to write


PASS, HOLD, KILL = "pass", "hold", "kill"
Act = Callable[[Seen], str | int]


class Gate:
    """Supervisor of system calls; `act` returns PASS, HOLD, KILL (the process), or an errno.

    A thread enters the gate by `enter`; `steps` are the kinds of supervised calls. Suspended calls
    continue after `release`, and at the end.
    """

    def __init__(self, act: Act) -> None:
        self.act = act
        self.held: list[Seen] = []
        self._waiting: list[int] = []
        self._lock = threading.Lock()
        self._end, self._ended = os.pipe()
        self._listener = -1
        self._thread: threading.Thread | None = None

    def watch(self, listener: int) -> None:
        """Start to answer calls, in a thread."""
        self._listener = listener
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def run(self, do: Callable[[], None], steps: tuple[str, ...]) -> threading.Thread:
        """Call `do` in a thread of this process behind the gate; skip the test without seccomp."""
        entered: SimpleQueue[int | str] = SimpleQueue()

        def work() -> None:
            try:
                entered.put(enter(steps))
            except OSError as error:
                entered.put(str(error))
            else:
                do()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        listener = entered.get(timeout=30)
        if isinstance(listener, str):
            pytest.skip(listener)
        self.watch(listener)
        return thread

    def release(self) -> None:
        """Continue all suspended calls, and suspend no others."""
        self.act = lambda _: PASS
        with self._lock:
            for number in self._waiting:
                self._answer(number, 0)
            self._waiting.clear()

    def close(self) -> None:
        self.release()
        os.close(self._ended)
        if self._thread:
            self._thread.join()
            os.close(self._listener)
        os.close(self._end)

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._end, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if self._end in ready or ready.get(self._listener, 0) & select.POLLHUP:
                return
            raw = bytearray(_ASKED.size)
            try:
                fcntl.ioctl(self._listener, _RECEIVE, raw)
            except OSError:  # it was killed meanwhile
                continue
            number, pid, _, call, _, _, *arguments = _ASKED.unpack(raw)
            seen = _seen(pid, call, arguments)
            with self._lock:
                action = self.act(seen)
                if action == HOLD:
                    self.held.append(seen)
                    self._waiting.append(number)
                    continue
            if action == KILL:
                os.kill(pid, signal.SIGKILL)
            else:
                self._answer(number, action if isinstance(action, int) else 0)

    def _answer(self, number: int, error: int) -> None:
        answer = _ANSWER.pack(number, 0, -error, 0 if error else _GO_ON)
        with contextlib.suppress(OSError):  # it was killed meanwhile
            fcntl.ioctl(self._listener, _SEND, bytearray(answer))


@contextlib.contextmanager
def gate(act: Act = lambda _: PASS) -> Iterator[Gate]:
    one = Gate(act)
    try:
        yield one
    finally:
        one.close()


def enter(steps: tuple[str, ...]) -> int:
    """Put the calling thread behind a gate; return the listener for its supervisor's `watch`.

    Raises OSError where the kernel or the container forbids it.
    """
    machine = _MACHINES.get(os.uname().machine)
    if machine is None:
        raise OSError(f"no table of system calls for {os.uname().machine}")
    architecture, seccomp, calls = machine
    numbers = [number for step in steps for number in calls[step]]
    program = [(0x20, 0, 0, 4), (0x15, 1, 0, architecture), (0x06, 0, 0, _ALLOW), (0x20, 0, 0, 0)]
    program += [(0x15, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    program += [(0x06, 0, 0, _ALLOW), (0x06, 0, 0, _ASK)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in program))
    head = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    )
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for flags in (_LISTEN | _KILLABLE, _LISTEN):
        listener = _libc.syscall(seccomp, _SET_FILTER, flags, head)
        if listener >= 0:
            return listener
    raise OSError(f"seccomp does not let a supervisor watch: {os.strerror(ctypes.get_errno())}")


def _seen(pid: int, call: int, arguments: list[int]) -> Seen:
    calls = _MACHINES[os.uname().machine][2]
    step = next(step for step, numbers in calls.items() if call in numbers)
    path, flags = "", 0
    with contextlib.suppress(OSError):  # the process is gone, or nobody's child any more
        if step in _BY_FD:
            path = str(Path(f"/proc/{pid}/fd/{arguments[0]}").readlink())
        elif call in _BY_PATH:
            path, flags = _path(pid, arguments[0]), arguments[1]
        else:
            at = ctypes.c_int32(arguments[0] & 0xFFFFFFFF).value
            here = "cwd" if at < 0 else f"fd/{at}"
            path = str(Path(f"/proc/{pid}/{here}").readlink() / _path(pid, arguments[1]))
            flags = arguments[2]
    writes = step == "open" and bool(flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR))
    return Seen(step, path, pid, writes)


def _path(pid: int, at: int) -> str:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
        memory.seek(at)
        room = _PATH_BYTES - at % _PATH_BYTES  # what lies on the next page may not be there
        data = memory.read(room)
        if b"\0" not in data:
            data += memory.read(_PATH_BYTES)
    return os.fsdecode(data.partition(b"\0")[0])
