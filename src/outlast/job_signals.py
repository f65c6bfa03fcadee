"""Signals that reach every process of a job.

Slurm (`scancel`, `--signal`, preemption), systemd and others signal the launcher and all workers at
once. The launcher answers for all: it ends the run behind a checkpoint, or saves one, and needs the
workers and their loader processes for it. They therefore live on after such a signal:

| process | after a signal that would end it |
|---|---|
| worker, from `init()` on | lives on if the launcher ends the run; else ends by it after GRACE_S |
| loader process of a worker | lives on until its worker ends it, or has ended |
| template process, keepers | live on until the launcher ends them |

A signal of --notice-signal ends nothing: the worker reports it to its agent.

Signals for which the script has a handler of its own are left to it.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils.data._utils import signal_handling

from outlast.config import JOB_SIGNALS

GRACE_S = 5.0  # of a signal that the launcher did not get
GRACE_S_MAX = 60.0  # ... where a recovery is under way meanwhile
_LOOK_S = 0.1
_SAVE = signal.SIGUSR1  # requests a checkpoint from the launcher


class JobSignals:
    """Handlers of one worker. `is_open`: whether no recovery is under way. `notices`: names of
    signals that end nothing; `on_notice` gets their numbers, also while the main thread is in a C
    extension, and perhaps twice."""

    def __init__(
        self,
        is_open: Callable[[], bool],
        notices: Collection[str] = (),
        on_notice: Callable[[int], None] = lambda _number: None,
    ) -> None:
        self._is_open = is_open
        self._notices = {signal.Signals[name] for name in notices}
        self._on_notice = on_notice
        self._pid = os.getpid()
        self._is_answered = threading.Event()
        self._pending: set[int] = set()
        self._due: set[int] = set()
        self._loader_processes: set[int] = set()

    def take(self) -> None:
        """Install the handlers, for signals that would end this process. Does nothing in a thread
        other than the main one, where Python allows none."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in JOB_SIGNALS:
            if _is_default(number):
                signal.signal(number, self._on_signal)
                signal.siginterrupt(number, False)
        if self._notices:
            self._read_signals()
        self._spare_loader_processes()

    def answer(self) -> None:
        """Note that the launcher ends the run: pending signals no longer end this process."""
        self._is_answered.set()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid or number in self._due:  # a child of the script, by fork
            _end_by(number)
        elif number in self._notices:
            self._on_notice(number)
        elif number != _SAVE and number not in self._pending:
            self._pending.add(number)
            threading.Thread(
                target=self._wait, args=(number,), name="outlast-signal", daemon=True
            ).start()

    def _read_signals(self) -> None:
        """Take notices on a thread: Python calls handlers in the main thread alone, between two of
        its instructions."""
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(reading, True)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_write_no_signals)

        def read() -> None:
            while numbers := os.read(reading, 64):
                for number in self._notices.intersection(numbers):
                    self._on_notice(number)

        threading.Thread(target=read, name="outlast-notices", daemon=True).start()

    def _wait(self, number: int) -> None:
        begin = time.monotonic()
        while not self._is_answered.wait(_LOOK_S):
            waited_s = time.monotonic() - begin
            if waited_s > (GRACE_S if self._is_open() else GRACE_S_MAX):
                self._due.add(number)
                os.kill(self._pid, number)  # the handler, in the main thread, ends the process
                self._is_answered.wait(GRACE_S)
                os.kill(self._pid, signal.SIGKILL)  # the main thread is in a C extension

    # --- loader processes ---

    def _spare_loader_processes(self) -> None:
        """Let loader processes that torch forks from now on ignore such signals, and end them
        before `multiprocessing` would wait for them at the exit."""
        handling: Any = signal_handling  # its stubs lack these functions
        set_handlers, set_pids = handling._set_worker_signal_handlers, handling._set_worker_pids  # noqa: SLF001 - torch has no hook

        def set_handlers_and_ignore() -> None:
            set_handlers()
            for number in JOB_SIGNALS:
                if number == signal.SIGTERM or signal.getsignal(number) == self._on_signal:
                    signal.signal(number, _ignore)  # unlike SIG_IGN, programs do not inherit it
                    signal.siginterrupt(number, False)

        def set_and_note_pids(loader: int, pids: tuple[int, ...]) -> None:
            self._loader_processes.update(pids)
            set_pids(loader, pids)

        handling._set_worker_signal_handlers = set_handlers_and_ignore  # noqa: SLF001 - the same
        handling._set_worker_pids = set_and_note_pids  # noqa: SLF001 - the same
        atexit.register(self._end_loader_processes)

    def _end_loader_processes(self) -> None:
        children = self._loader_processes & _children()
        if children:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's would raise for a killed child
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _write_no_signals() -> None:
    """Let a child of the script not write its signals into the worker's pipe."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal by nothing."""


def _end_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _is_default(number: int) -> bool:
    """Return whether a signal would end this process; a C extension may have a handler."""
    handler = signal.getsignal(number)
    if handler is signal.default_int_handler:
        return True
    status = Path("/proc/self/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return handler is signal.SIG_DFL and not caught >> (number - 1) & 1


def _children() -> set[int]:
    """Return the pids of the processes that this one has started and not reaped."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # this thread has ended
            found.update(map(int, (task / "children").read_text().split()))
    return found
