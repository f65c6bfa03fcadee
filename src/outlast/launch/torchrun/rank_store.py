"""Store of a group's ranks at MASTER_PORT, in a process of the launcher, as in torchrun's agent.

Each attempt has a new store. The process opens it at a port that it reads from stdin, closes the
one before, and writes the port to stdout.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable

from outlast.errors import ConfigError
from outlast.launch.host.worker_family import signal_name

OPEN_S = 120.0  # includes the import of torch on a busy host
_SERVE = """
import sys
from torch.distributed import TCPStore
store = None
for line in sys.stdin:
    store = None
    try:
        store = TCPStore("localhost", int(line), is_master=True, wait_for_workers=False)
        print(store.port, flush=True)
    except Exception as error:
        print("failed:", " ".join(str(error).split()), flush=True)
"""


class RankStore:
    """Process that serves the store; it ends with the launcher. `leaders`: pids that their owners
    reap; `note` receives the end of the process as text."""

    def __init__(self, leaders: set[int], note: Callable[[str], None]) -> None:
        self._leaders, self._note = leaders, note
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

    async def open(self, port: int) -> int:
        """Replace the store by an empty one at `port` (0: any free port); return its port.

        Raises ConfigError if it cannot be opened.
        """
        async with self._opening:
            if self._process.poll() is not None:
                self.close()
                self._start()
            try:
                answer = await asyncio.wait_for(asyncio.to_thread(self._ask, port), OPEN_S)
            except (TimeoutError, OSError) as error:
                self.close()
                answer = f"its process does not answer ({type(error).__name__})"
        if answer.isdecimal():
            return int(answer)
        raise ConfigError(
            f"the store of the ranks cannot be opened at port {port or '(any free one)'}:"
            f" {answer or 'its process has ended'}; choose another --master-port"
        )

    def look(self) -> None:
        """Note that the process has ended by itself, perhaps for lack of memory."""
        code = self._process.poll()
        if code is None:
            return
        how = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
        self._note(f"the process with the store of the ranks has ended ({how}): they lost it")

    def _ask(self, port: int) -> str:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(b"%d\n" % port)
        self._process.stdin.flush()
        return self._process.stdout.readline().decode(errors="replace").strip()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._leaders.discard(self._process.pid)
