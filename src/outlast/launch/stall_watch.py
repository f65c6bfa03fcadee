"""Detection of stalls of this process: stopped, suspended, or in a blocked write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

BEAT_S = 0.25
STILL_S = 1.0  # a later beat means that this process stalled, not that peers were silent


class StallWatch:
    """A timer that runs periodically. `on_stall` gets the time and the length of a stall."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        now_ns: Callable[[], int],
        on_stall: Callable[[int, int], None],
    ) -> None:
        self._loop, self._now_ns, self._on_stall = loop, now_ns, on_stall
        self._ran_ns = 0  # last time at which this process ran
        self._pulse: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Look now, and periodically from now on."""
        self.look()
        self._pulse = self._loop.call_later(BEAT_S, self.begin)

    def look(self) -> None:
        """Report a stall; called before any input that has waited meanwhile is handled."""
        now_ns = self._now_ns()
        gap_ns = now_ns - self._ran_ns if self._ran_ns else 0
        self._ran_ns = now_ns
        if gap_ns > (BEAT_S + STILL_S) * 1e9:
            self._on_stall(now_ns, gap_ns)

    def close(self) -> None:
        """Look no more."""
        if self._pulse:
            self._pulse.cancel()
