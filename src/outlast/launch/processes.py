"""One worker process and its family: started through the shim, watched by pidfd, killed whole."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from outlast.launch import warden
from outlast.page import Page

_SHIM = Path(__file__).with_name("shim.py")
_PR_SET_CHILD_SUBREAPER = 36
KILL_S = 10.0  # SIGKILL -> the last of the family is a zombie; only a sick kernel needs longer
TAIL_LINES = 40
_TAIL_BYTES = 64 << 10


class Born(NamedTuple):
    """What a worker is started with, besides its command."""

    name: str
    mark: str  # of its family, unique to this worker
    environment: Mapping[str, str]
    log_dir: Path
    control: socket.socket  # the worker's end; closed here once the worker has it
    page: Page


def become_subreaper() -> None:
    """Orphans of our workers become our children, so that they can be found and reaped.

    Raises OSError where the kernel refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class Process:
    """A started worker. `exit_code` is as in subprocess: negative for a signal, None while alive.

    `on_exit` is called once in the event loop when the main process has died; it stays a zombie
    (and its session's number taken) until `bury` has killed and reaped the whole family.
    """

    def __init__(self, command: Sequence[str], born: Born, on_exit: Callable[[], None]) -> None:
        self.name = born.name
        self.mark = born.mark
        self.log_dir = born.log_dir
        self.page = born.page
        shim = [sys.executable, "-I", "-S", str(_SHIM), str(os.getpid()), *command]
        with (
            born.control,
            (born.log_dir / "stdout.log").open("ab") as out,
            (born.log_dir / "stderr.log").open("ab") as err,
        ):
            self._popen = subprocess.Popen(
                shim,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=born.environment,
                pass_fds=(born.control.fileno(), born.page.fd),
                start_new_session=True,
            )
        self.pid = self._popen.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self._loop.add_reader(self._pidfd, self._died)

    def _died(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._on_exit()

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the main process. SIGKILL ends stopped ones, too; `on_exit` follows."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    @property
    def state(self) -> str:
        """The kernel's state letter (R S D T t Z), "X" when it is gone."""
        seen = warden.look(self.pid)
        return seen.state if seen else "X"

    async def bury(self) -> int:
        """Kill and reap the whole family; the main process's exit code.

        Raises TimeoutError when somebody survives SIGKILL for KILL_S seconds.
        """
        self.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + KILL_S
        pause_s = 0.001
        while alive := self._family():
            if time.monotonic() > deadline:
                left = ", ".join(f"{process.pid} ({process.state})" for process in alive)
                raise TimeoutError(
                    f"processes of worker {self.name} survive SIGKILL for {KILL_S:g} s: {left}"
                )
            for process in alive:
                warden.kill(process)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)
        exit_code = self._popen.wait(timeout=KILL_S)
        with contextlib.suppress(OSError):
            os.close(self._pidfd)
        return exit_code

    def _family(self) -> list[warden.Seen]:
        """The living among our descendants that are of this family; reaps its orphans."""
        seen = warden.everybody()
        below = warden.descendants({os.getpid()}, seen)
        roots = {
            pid
            for pid in below
            if pid == self.pid or seen[pid].session == self.pid or warden.is_marked(pid, self.mark)
        }
        alive = []
        for pid in warden.descendants(roots, seen):
            if seen[pid].state not in "ZX":
                alive.append(seen[pid])
            elif pid != self.pid and seen[pid].parent == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        return alive

    def stderr_tail(self) -> str:
        """The last TAIL_LINES lines that it wrote to stderr."""
        return tail(self.log_dir / "stderr.log")


def tail(path: Path) -> str:
    """The last TAIL_LINES lines of a log, at most 64 KiB; "" when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-TAIL_LINES:])


class Warden:
    """The launcher's end of the warden: told each session, it outlives a killed launcher."""

    def __init__(self, mark: str, lock_fd: int) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(warden.__file__)), mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(lock_fd,),
            start_new_session=True,
            bufsize=0,
        )

    def born(self, session: int) -> None:
        self._tell(f"+{session}\n")

    def buried(self, session: int) -> None:
        self._tell(f"-{session}\n")

    def _tell(self, line: str) -> None:
        assert self._popen.stdin is not None
        # Without its warden the run goes on: the parent-death signal still covers the workers.
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(line.encode())

    def dismiss(self) -> None:
        """End it: whatever is still there of our workers dies first."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        try:
            self._popen.wait(timeout=warden.SWEEP_S + KILL_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait(timeout=KILL_S)
