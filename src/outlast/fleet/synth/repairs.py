"""How long a node is away once it has left, and what is done to it meanwhile."""

from __future__ import annotations

import random
from typing import NamedTuple

# Table II of the paper: what the lemons had, as shares.
PARTS = {
    "optics": 0.026, "cpu": 0.026, "psu": 0.051, "nic": 0.077, "eud": 0.103, "pcie": 0.154,
    "dimm": 0.205, "gpu": 0.282, "bios": 0.077,
}  # fmt: skip
_REBOOTED, _TICKET = 0.6, 0.9  # shares up to these; for the rest a part is exchanged


class Absence(NamedTuple):
    """A node is away. `part`: "" if it was only rebooted, "?" if somebody looked and exchanged
    nothing."""

    node: int
    since_s: float
    until_s: float
    cause: int
    part: str


def absence(node: int, since_s: float, cause: int, rng: random.Random) -> Absence:
    """20 to 60 minutes for a reboot, half a day with a ticket, two days where a part is
    exchanged: 0.38 days in the mean."""
    drawn = rng.random()
    if drawn < _REBOOTED:
        away_s, part = rng.uniform(1200, 3600), ""
    elif drawn < _TICKET:
        away_s, part = 3600 + rng.expovariate(1 / (11 * 3600)), "?"
    else:
        away_s = 6 * 3600 + rng.expovariate(1 / (42 * 3600))
        (part,) = rng.choices(list(PARTS), list(PARTS.values()))
    return Absence(node, since_s, since_s + round(away_s), cause, part)
