"""A node check in a process of its own, with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from outlast.launch.host import reaper

_SHIM = Path(__file__).with_name("shim.py")
ANSWER_BYTES_MAX = 8 << 20
KILL_S = 2.0  # SIGKILL -> reaped; then it is left behind, and no other is started beside it
NICE = 10  # less, and a node whose cores are all in use would never answer
_PAUSE_S = 0.01


class CheckFailedError(Exception):
    """There is no answer; the message says why."""


class CheckProcess:
    """Runs `command`, one process at a time; its errors go to a file in `folder`. `leaders`: pids
    that nobody else may reap."""

    def __init__(
        self, command: Sequence[str], folder: Path, deadline_s: float, leaders: set[int]
    ) -> None:
        self._command = command
        self._folder = folder
        self._deadline_s = deadline_s
        self._leaders = leaders
        self._kin: set[int] = set()
        self._popen: subprocess.Popen[bytes] | None = None

    async def look(self) -> bytes:
        """Return the output of the check. Raises FailedError. Kills its processes if cancelled."""
        if self._popen is not None and not self._has_ended():
            raise CheckFailedError(f"the one before (process {self._popen.pid}) cannot be killed")
        try:
            popen = self._popen = self._start()
        except OSError as error:
            raise CheckFailedError(f"it cannot be started: {error}") from error
        assert popen.stdout is not None
        try:
            text = await self._read(popen.stdout.fileno())
            await self._gone_within(KILL_S)
        except TimeoutError:
            raise CheckFailedError(f"no answer within {self._deadline_s:g} s") from None
        finally:
            self._kill()
            popen.stdout.close()
            await self._gone_within(KILL_S)
        if not text:
            raise CheckFailedError(
                f"it said nothing, exit code {popen.returncode}{self._last_words()}"
            )
        return text

    def _start(self) -> subprocess.Popen[bytes]:
        # A check uses no state that others may write, which by a umask of 002 the group may.
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self._folder / "stderr.log").open("wb") as errors:
            popen = subprocess.Popen(
                # It dies with this process, as workers do.
                [sys.executable, "-I", "-S", str(_SHIM), str(os.getpid()), *self._command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._leaders.add(popen.pid)
        with contextlib.suppress(OSError):  # a courtesy to the workers
            os.setpriority(os.PRIO_PROCESS, popen.pid, NICE)
        return popen

    async def _read(self, pipe: int) -> bytes:
        """Until it closes the pipe. Raises TimeoutError, and FailedError for one without end."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        data = bytearray()

        def more() -> None:
            with contextlib.suppress(BlockingIOError):
                chunk = os.read(pipe, 1 << 16)
                data.extend(chunk)
                if (not chunk or len(data) > ANSWER_BYTES_MAX) and not ended.done():
                    ended.set_result(None)

        os.set_blocking(pipe, False)
        loop.add_reader(pipe, more)
        try:
            await asyncio.wait_for(ended, self._deadline_s)
        finally:
            loop.remove_reader(pipe)
        if len(data) > ANSWER_BYTES_MAX:
            raise CheckFailedError(f"it answered more than {ANSWER_BYTES_MAX:,} bytes")
        return bytes(data)

    def _kill(self) -> None:
        """At once, with everybody below it; who has sessions of their own as well."""
        popen = self._popen
        if popen is None or self._has_ended():
            return
        processes = reaper.all_processes()
        below = reaper.descendants({popen.pid}, processes)
        family = [processes[pid] for pid in below if pid in processes]
        self._kin |= {process.pid for process in family} - {popen.pid}
        popen.send_signal(signal.SIGKILL)
        for process in family:
            reaper.kill(process)

    async def _gone_within(self, seconds: float) -> bool:
        until_s = time.monotonic() + seconds
        while not self._has_ended():
            if time.monotonic() > until_s:
                return False
            await asyncio.sleep(_PAUSE_S)
        return True

    def _has_ended(self) -> bool:
        """Return whether no process is left; reap those that became our children (we are a
        subreaper)."""
        popen = self._popen
        if popen is None:
            return True
        if popen.poll() is None:
            return False
        self._leaders.discard(popen.pid)
        for pid in tuple(self._kin):
            try:
                gone = os.waitpid(pid, os.WNOHANG)[0] == pid
            except ChildProcessError:
                gone = True
            if gone:
                self._kin.discard(pid)
        return not self._kin

    def _last_words(self) -> str:
        try:
            lines = (self._folder / "stderr.log").read_bytes()[-4096:].decode(errors="replace")
        except OSError:
            return ""
        words = lines.strip().splitlines()
        return f": {words[-1]}" if words else ""
