"""The checkpoints of a simulated run, as its keepers and its disk hold them."""

from __future__ import annotations

import math

from outlast import wire


class Shelf:
    """Checkpoints by phase: the newest two in memory, until a host is lost, and those on the disk.
    With `rots`, the newest on the disk is damaged when a restart looks."""

    def __init__(self, *, rots: bool) -> None:
        self._rots = rots
        self._copies: list[int] = []
        self._whole: list[int] = []
        self._known_s = math.inf

    def stage(self, n: int) -> wire.Checkpointed:
        """Every rank has copied its part."""
        self._copies = [*self._copies[-1:], n]
        self._known_s = math.inf
        return _at(n, "memory")

    def save(self, n: int, *, fails: bool = False) -> wire.Checkpointed | wire.SaveFailed:
        """It is on the disk now, unless it fails."""
        if fails:
            return wire.SaveFailed(n=n, step=n, error="no space left")
        self._whole.append(n)
        return _at(n, "disk")

    def forget(self, known_s: float) -> None:
        """A host is gone, and its part of every copy in memory, which everybody knows by then."""
        self._copies = []
        self._known_s = min(self._known_s, known_s)

    def newest(self) -> wire.Checkpointed | None:
        n = max(self._whole, default=0)
        return _at(n, "disk") if n else None

    def verified(self) -> wire.Checkpointed | None:
        """What a restart finds; the last one stays whole, so that progress is possible."""
        if self._rots and len(self._whole) > 1:
            self._whole.remove(max(self._whole))
        disk, copy = self.newest(), max(self._copies, default=0)
        return _at(copy, "memory") if copy and (disk is None or copy >= disk.n) else disk

    def load(self, checkpoint: wire.Checkpointed | None) -> int | None:
        """Its phase (0 without one); None where there is no such one."""
        if checkpoint is None:
            return 0
        held = self._copies if self.is_in_memory(checkpoint) else self._whole
        return checkpoint.n if checkpoint.n in held else None

    def is_in_memory(self, checkpoint: wire.Checkpointed | None) -> bool:
        return checkpoint is not None and checkpoint.tier == "memory"

    def is_known_to_lack(self, checkpoint: wire.Checkpointed | None, now_s: float) -> bool:
        """Whether nobody should be told any more to start from it."""
        lost = self.load(checkpoint) is None
        return lost and (not self.is_in_memory(checkpoint) or now_s > self._known_s)


def _at(n: int, tier: str) -> wire.Checkpointed:
    """With what it took, as seat 0 says it."""
    return wire.Checkpointed(
        n=n, step=n, path=f"{tier} {n}", tier=tier, blocking_s=0.01, flush_s=0.2, step_s=0.2
    )
