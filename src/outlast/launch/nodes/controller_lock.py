"""Lock of the run directory, as a node takes it over together with the control of a run.

The file names the controller's process, for `outlast ckpt now` on its host. The lock itself is free
only when the former controller and its reaper have ended: a process that is stopped keeps it. Who
may act is decided by the store of terms alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from pathlib import Path

from outlast.launch.run_directory import lock_words

RETRY_S = 1.0


class ControllerLock:
    """DIR/lock in the hands of a node that has taken over. Errors of the file system are ignored:
    then nobody can request a save, and a second start is refused by the store of terms alone."""

    def __init__(self, run_dir: Path) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    async def keep(self) -> None:
        """Lock the directory as soon as it is free."""
        while True:
            if self._fd < 0 or self._lock():
                return
            await asyncio.sleep(RETRY_S)

    def show(self, *, saves: bool) -> None:
        """Name this process as the controller's. `saves`: SIGUSR1 requests a checkpoint from it."""
        with contextlib.suppress(OSError):
            words = lock_words(saves)
            os.pwrite(self._fd, words, 0)
            os.ftruncate(self._fd, len(words))

    def release(self) -> None:
        """Unlock the directory: a newer term exists, or the run has ended."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True
