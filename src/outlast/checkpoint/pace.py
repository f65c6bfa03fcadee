"""How fast bytes may move, and whether they still should: kept by all threads of one copy."""

from __future__ import annotations

import time
from threading import Event, Lock

from outlast.errors import StorageError

_BURST_S = 0.25
_LOOK_S = 0.1


class Pace:
    """A limit in bytes a second (None: none), and an end that may come at any time.

    `stop` is the caller's, who asks for the end; `end` is ours, when another thread has failed.
    """

    def __init__(self, limit_bytes_per_s: float | None, stop: Event) -> None:
        self._limit = limit_bytes_per_s
        self._stop = stop
        self._ended = Event()
        self._free_at = time.monotonic()
        self._lock = Lock()

    def spend(self, size_bytes: int) -> None:
        """Wait until so many more bytes may move. Raises StorageError once the copy is to end."""
        until = self._booked(size_bytes)
        while not (self._stop.is_set() or self._ended.is_set()):
            left_s = until - time.monotonic()
            if left_s <= 0:
                return
            self._ended.wait(min(left_s, _LOOK_S))
        raise StorageError("the copy was stopped; what it has sent is used by the next one")

    def end(self) -> None:
        """Let every thread that spends come to its end."""
        self._ended.set()

    def _booked(self, size_bytes: int) -> float:
        """When they may move; a pause earns no more than _BURST_S of haste."""
        if not self._limit:
            return 0.0
        with self._lock:
            earliest = time.monotonic() - _BURST_S
            self._free_at = max(self._free_at, earliest) + size_bytes / self._limit
            return self._free_at
