"""Checkpoints of a simulated run, in keepers' memory and on disk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from outlast.controller.audit.audit_records import CopyBar, is_barred
from outlast.transport import messages


class SimCheckpoints:
    """Checkpoints by phase: the newest two in memory, until a host is lost, and those on disk.

    With `rots`, the newest one on disk is damaged when a restart reads it.
    """

    def __init__(self, *, rots: bool) -> None:
        self._rots = rots
        self._copies: list[messages.Checkpointed] = []
        self._on_disk: list[messages.Checkpointed] = []
        self._tainted: dict[str, set[int]] = {}  # saved while ranks had models with these flips
        self._condemned: set[str] = set()  # likewise, and an audit has found it since
        self._known_s = math.inf

    def stage(self, n: int, mark: str = "", flips: Iterable[int] = ()) -> messages.Checkpointed:
        """Record that every rank has copied its part.

        `mark`: term and generation, as in a real name. `flips`: flipped bits that ranks suffer
        from.
        """
        copy = _at(n, "memory", mark)
        self._copies = [*self._copies[-1:], copy]
        self._known_s = math.inf
        if found := set(flips):
            self._tainted[copy.path] = self._tainted[_at(n, "disk", mark).path] = found
        return copy

    def save(
        self, n: int, mark: str = "", *, fails: bool = False
    ) -> messages.Checkpointed | messages.SaveFailed:
        """Write a checkpoint to disk, unless it `fails`."""
        if fails:
            return messages.SaveFailed(n=n, step=n, error="no space left")
        self._on_disk.append(_at(n, "disk", mark))
        return self._on_disk[-1]

    def forget(self, known_s: float) -> None:
        """Drop the copies in memory after the loss of a host, known to all from `known_s` on."""
        self._copies = []
        self._known_s = min(self._known_s, known_s)

    def condemn(self) -> None:
        """Bar checkpoints that were saved while a rank was wrong, after an audit found it."""
        self._condemned |= self._tainted.keys()

    def absolve(self, flip: int) -> None:
        """Clear checkpoints of a flip that all ranks share: no audit can find it any more."""
        for path in [path for path, flips in self._tainted.items() if flips <= {flip}]:
            del self._tainted[path]

    def is_condemned(self, checkpoint: messages.Checkpointed | None) -> bool:
        """Return whether the run must not start from this checkpoint."""
        return checkpoint is not None and checkpoint.path in self._condemned

    def newest(self, bars: Sequence[CopyBar] = ()) -> messages.Checkpointed | None:
        """Return the newest unbarred checkpoint on disk."""
        return _newest(self._on_disk, bars)

    def verified(self, bars: Sequence[CopyBar] = ()) -> messages.Checkpointed | None:
        """Return the checkpoint that a restart finds; the last one never rots."""
        disk = _newest(self._on_disk, bars)
        if self._rots and disk is not None and len({one.n for one in self._on_disk}) > 1:
            self._on_disk = [one for one in self._on_disk if one.path != disk.path]
            disk = _newest(self._on_disk, bars)
        copy = _newest(self._copies, bars)
        return copy if copy and (disk is None or copy.n >= disk.n) else disk

    def load(self, checkpoint: messages.Checkpointed | None) -> int | None:
        """Return the phase of a checkpoint (0 for None); None where it does not exist."""
        if checkpoint is None:
            return 0
        checkpoints = self._copies if self.is_in_memory(checkpoint) else self._on_disk
        return checkpoint.n if checkpoint.path in {one.path for one in checkpoints} else None

    def is_in_memory(self, checkpoint: messages.Checkpointed | None) -> bool:
        """Return whether it is a copy in keepers' memory."""
        return checkpoint is not None and checkpoint.tier == "memory"

    def is_known_to_lack(self, checkpoint: messages.Checkpointed | None, now_s: float) -> bool:
        """Return whether all know that it does not exist any more."""
        lost = self.load(checkpoint) is None
        return lost and (not self.is_in_memory(checkpoint) or now_s > self._known_s)


def _newest(
    checkpoints: Sequence[messages.Checkpointed], bars: Sequence[CopyBar]
) -> messages.Checkpointed | None:
    allowed = [one for one in checkpoints if not is_barred(bars, one.n, one.path)]
    return max(allowed, key=lambda one: one.n, default=None)


def _at(n: int, tier: str, mark: str) -> messages.Checkpointed:
    """Return a checkpoint with typical times, as seat 0 reports it."""
    return messages.Checkpointed(
        n=n, step=n, path=f"{tier} n{n} {mark}", tier=tier, blocking_s=0.01, flush_s=0.2,
        step_s=0.2,
    )  # fmt: skip
