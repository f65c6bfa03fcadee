"""The time by which checkpoints grow old."""

from __future__ import annotations

import time


class Calendar:
    """Unix time, but for a clock that is set forward meanwhile: nothing grows old at once by that.

    One that is set back is believed, since it lets more stay.
    """

    def __init__(self) -> None:
        self._ahead_ns = time.time_ns() - time.monotonic_ns()

    def now_ns(self) -> int:
        return min(time.time_ns(), time.monotonic_ns() + self._ahead_ns)
