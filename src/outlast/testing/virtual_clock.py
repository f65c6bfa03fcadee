"""A virtual clock with seeded delays."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

NS = 1_000_000_000


class VirtualClock:
    """Runs callbacks in order of their virtual times; equal ones in order of creation."""

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.dice = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    @property
    def now_ns(self) -> int:
        """Return the virtual time in ns; it starts at 1 s."""
        return int(self.now_s * NS) + NS

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Run a callback at this time, or now if that is past."""
        self._count += 1
        heapq.heappush(self._heap, (max(time_s, self.now_s), self._count, call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Run a callback after this delay."""
        self.at(self.now_s + delay_s, call)

    def between(self, low_s: float, high_s: float) -> float:
        """Return a random number of this range."""
        return low_s + (high_s - low_s) * self.dice.random()

    def step(self) -> bool:
        """Run the next callback; return False when none is left."""
        if not self._heap:
            return False
        self.now_s, _, call = heapq.heappop(self._heap)
        call()
        return True
