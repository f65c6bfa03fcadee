"""The watch over this host's workers: pages and kernel states in, verdicts out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from outlast import wire
from outlast.launch.crew import Crew

PERIOD_S = (0.02, 0.25)
FLOOR_PART = 20


class Watch:
    """Looks at every page once a period: a twentieth of the hang floor, 20 to 250 ms."""

    def __init__(self, crew: Crew, say: Callable[[wire.AnyBody], None]) -> None:
        self._crew = crew
        self._say = say
        shortest_s, longest_s = PERIOD_S
        floor_s = crew.plan.limits.hang_floor_s
        self._period_s = min(longest_s, max(shortest_s, floor_s / FLOOR_PART))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(self._period_s)

    def look(self) -> None: ...
