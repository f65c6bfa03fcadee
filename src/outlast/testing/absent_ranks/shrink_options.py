"""Options of a simulated run that may go on with fewer ranks."""

from __future__ import annotations

from typing import NamedTuple

HOST_LOSSES = ("lose", "lose two", "lose for good")  # hosts without power for long
RESPAWNS_AMPLE = 400


class ShrinkOptions(NamedTuple):
    """Options that decide which ranks leave, and what they train."""

    rows: int = 4  # batches of a rank in an epoch; 0: ranks have batches of their own
    room: int = 0  # workers that a host may have; 0: enough for all
    respawns_max: int = RESPAWNS_AMPLE
    root: int = -1  # rank that is the root of a collective, and never leaves; -1: none
    needs_all: bool = False  # the script's collectives need all ranks
    unit: int = 1  # ranks that need each other: a replica, each of whose ranks has other shards
    shares: bool = False  # the ranks of a unit train the same batches
    forgets: bool = False  # ranks report their groups with their answers to Close alone
