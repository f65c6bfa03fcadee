"""A thread that reports whether the main thread, while it stands still, waits for other ranks.

Standing still inside a collective and standing still outside one look alike from outside the
process, and mean different things: the first depends on other ranks, the second is an upload, a
rollout, a sleep, or a hang. Python's interpreter must run for the thread to run: a pulse that has
stopped in a process that has not says that a C extension holds the interpreter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from outlast.transport.worker_page import Page, Pulse

_PERIOD_S = (0.02, 0.5)
_FLOOR_PART = 10  # of the hang floor: several readings before anybody is judged


class PulseThread:
    """Writes the page's pulse several times a hang floor; 50 us each, off the step's path."""

    def __init__(self, page: Page, is_waiting: Callable[[], bool], floor_s: float) -> None:
        """`is_waiting`: whether an operation with other ranks is under way; from any thread."""
        self._page, self._is_waiting = page, is_waiting
        least_s, most_s = _PERIOD_S
        self._period_s = min(most_s, max(least_s, floor_s / _FLOOR_PART))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outlast-pulse", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._period_s):
            self.write()

    def write(self) -> None:
        """Write one reading; of a main thread that moves nothing need be known."""
        beat_ns, now_ns = self._page.read().t_ns, time.monotonic_ns()
        still = now_ns - beat_ns > self._period_s * 1e9
        is_waiting = still and self._is_waiting()
        before = self._page.pulse()
        released = before.is_waiting and not is_waiting
        self._page.put_pulse(
            Pulse(now_ns, beat_ns, is_waiting, now_ns if released else before.released_ns)
        )
