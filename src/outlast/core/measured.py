"""What this launch has measured of its own saves, steps and failures."""

from __future__ import annotations

import msgspec

from outlast.core.costs import Costs, Running


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """`failures`: those after which all began again; so many of them `from_memory` and
    `from_disk`, the rest from nothing. `restoring`: where the one that is under way begins."""

    since_ns: int = 0  # when this launch began
    step: Running = Running()
    memory: Costs = Costs()
    disk: Costs = Costs()
    failures: int = 0
    from_memory: int = 0
    from_disk: int = 0
    restoring: str = ""
    restoring_ns: int = 0  # when it was decided to begin again; 0: all is well
