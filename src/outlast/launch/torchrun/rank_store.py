"""Store of a group's ranks at MASTER_PORT, in a process of the launcher, as in torchrun's agent.

Each attempt has a new store. The process opens it at a port that it reads from stdin, closes the
one before, and writes the port to stdout. An empty line closes the store.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable

from outlast.errors import ConfigError
from outlast.events import Fault
from outlast.launch.host.worker_family import signal_name

OPEN_S = 120.0  # includes the import of torch on a busy host
_SERVE = """
import sys
from torch.distributed import TCPStore
store = None
for line in sys.stdin:
    store = None
    try:
        if line.strip():
            store = TCPStore("localhost", int(line), is_master=True, wait_for_workers=False)
        print(store.port if store else 0, flush=True)
    except Exception as error:
        print("failed:", " ".join(str(error).split()), flush=True)
"""


class RankStore:
    """Process that serves the store; it ends with the launcher. `leaders`: pids that their owners
    reap; `on_end` is called if it ends before the launcher."""

    def __init__(self, leaders: set[int]) -> None:
        self._leaders = leaders
        self.on_end: Callable[[Fault], None] = lambda _: None
        self._opening = asyncio.Lock()
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._leaders.add(self._process.pid)
        self._pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._ended)

    async def open(self, port: int) -> int:
        """Replace the store by an empty one at `port` (0: any free port); return its port.

        Raises ConfigError if it cannot be opened.
        """
        answer = await self._answer(b"%d\n" % port)
        if answer.isdecimal():
            return int(answer)
        raise ConfigError(
            f"the store of the ranks cannot be opened at port {port or '(any free one)'}:"
            f" {answer or 'its process has ended'}; choose another --master-port"
        )

    async def free(self) -> None:
        """End the store, and its connections; its port is free."""
        await self._answer(b"\n")

    async def _answer(self, line: bytes) -> str:
        """Return the answer of the process to a port, or to an empty line; kill a silent one."""
        async with self._opening:
            if self._pidfd < 0:
                self._start()
            try:
                return await asyncio.wait_for(asyncio.to_thread(self._ask, line), OPEN_S)
            except (TimeoutError, OSError) as error:
                self.close()
                return f"its process does not answer ({type(error).__name__})"

    def _ended(self) -> None:
        """Report that the process has ended by itself, perhaps for lack of memory. Ranks would wait
        for it for minutes."""
        number = -self._process.wait()
        self.close()
        how = f"killed by {signal_name(number)}" if number > 0 else f"exit code {-number}"
        detail = f"the process with the store of the ranks has ended ({how})"
        self.on_end(Fault(kind="killed", detail=detail, signal=max(0, number)))

    def _ask(self, line: bytes) -> str:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(line)
        self._process.stdin.flush()
        return self._process.stdout.readline().decode(errors="replace").strip()

    def close(self) -> None:
        """End the process."""
        if self._pidfd < 0:
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._process.kill()
        self._process.wait()
        self._leaders.discard(self._process.pid)
