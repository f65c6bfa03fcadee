"""Memory and CPU time of this process and all that it has started."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

EVERY_S = 0.02


def family() -> list[int]:
    """This process and its descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has just ended
                stat = (entry / "stat").read_text()
                parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def cpu_s() -> float:
    """CPU time so far of those that live."""
    total = 0.0
    for pid in family():
        with suppress(OSError):
            total += time.clock_gettime(~pid << 3 | 2)  # how Linux numbers a process's clock
    return total


def memory_bytes() -> int:
    """What they have in memory; what several share counts once."""
    total = 0
    for pid in family():
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


class Memory:
    """The most that was in memory inside its `with` block, beyond what there was when it was
    made. Looking costs time: nothing else is measured meanwhile."""

    def __init__(self) -> None:
        self._before = memory_bytes()
        self.peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, memory_bytes() - self._before)
            if self._ended.wait(EVERY_S):
                return
