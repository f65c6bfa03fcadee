"""Connections of a listener that have not shown the token yet: few, for a short time, counted.

When the table is full, a new connection takes the place of the oldest one of the address that has
the most: a flood of connections that send nothing keeps out neither a node of another address nor
one that sends its first frame at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

NOTE_S = 10.0  # period of notes about refused connections
REASONS_MAX = 8


class Stranger:
    """One connection. `close` ends it, for a reason, which its owner reports to `refuse`."""

    def __init__(self, address: str, close: Callable[[str], None]) -> None:
        self.address, self.close = address, close


class StrangerTable:
    """Connections to `place`, of which `note` learns when they are refused: each NOTE_S at most."""

    def __init__(
        self, place: str, limit: int, timeout_s: float, note: Callable[[str], None]
    ) -> None:
        self._place, self._limit, self._timeout_s, self._note = place, limit, timeout_s, note
        self._timers: dict[Stranger, asyncio.TimerHandle] = {}
        self._reasons: Counter[str] = Counter()  # of refusals since the last note
        self._noting: asyncio.TimerHandle | None = None
        self.refused = 0  # connections

    def __len__(self) -> int:
        return len(self._timers)

    def __contains__(self, stranger: Stranger) -> bool:
        return stranger in self._timers

    def add(self, stranger: Stranger) -> None:
        """Give a connection its time to show the token."""
        if len(self._timers) >= self._limit:
            self._evict()
        self._timers[stranger] = asyncio.get_running_loop().call_later(
            self._timeout_s, stranger.close, f"no message for {self._timeout_s:g} s"
        )

    def admit(self, stranger: Stranger) -> None:
        """Remove a connection that has shown the token, or has ended."""
        if timer := self._timers.pop(stranger, None):
            timer.cancel()

    def refuse(self, stranger: Stranger, reason: str) -> None:
        """Remove a connection that is refused, and count it."""
        self.admit(stranger)
        self.refused += 1
        known = reason in self._reasons or len(self._reasons) < REASONS_MAX
        self._reasons[reason if known else "other reasons"] += 1
        if self._noting is None:
            self._report()

    def close(self, reason: str) -> None:
        """Note what was refused since the last note, close all connections, and stop counting."""
        if self._noting:
            self._noting.cancel()
            self._report()
        for stranger in list(self._timers):
            self.admit(stranger)
            stranger.close(reason)
        if self._noting:
            self._noting.cancel()
            self._noting = None  # the place may open again

    def _evict(self) -> None:
        busiest = Counter(one.address for one in self._timers).most_common(1)[0][0]
        oldest = next(one for one in self._timers if one.address == busiest)
        oldest.close(f"it sent nothing, and others wait ({self._limit} at most)")
        self.admit(oldest)

    def _report(self) -> None:
        """Note what was refused since the last note, and look again later."""
        self._noting = None
        if not self._reasons:
            return
        count = self._reasons.total()
        often = "; ".join(
            f"{reason} ({number} times)" if count > 1 else reason
            for reason, number in self._reasons.most_common()
        )
        many = "a connection" if count == 1 else f"{count} connections"
        self._reasons.clear()
        self._noting = asyncio.get_running_loop().call_later(NOTE_S, self._report)
        self._note(f"{many} to {self._place} {'was' if count == 1 else 'were'} refused: {often}")
