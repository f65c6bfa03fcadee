"""How a run is to be saved, as its owner asked for it."""

from __future__ import annotations

import msgspec

from outlast.config import AUTO


class SavePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """`memory`, `disk`: committed steps between copies in memory, and between checkpoints on disk;
    0: none but those that somebody asks for; AUTO: as the schedule says.

    `durable`: checkpoints go on to storage that outlives this host. `stop`: a save that fails ends
    the run.
    """

    memory: int = 0
    disk: int = 0
    durable: bool = False
    stop: bool = False

    @property
    def auto(self) -> bool:
        """Whether any interval is the schedule's to choose."""
        return AUTO in (self.memory, self.disk)
