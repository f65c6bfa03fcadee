"""A rank's arenas in turn: made at the first save, or before it in a thread beside training.

reserve: a thread fills `ahead` -> make: takes over those of a useful size -> free: in turn
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Literal

from outlast.checkpoint.arena import ALIGN_BYTES
from outlast.checkpoint.device import Device
from outlast.checkpoint.keeper.client import Keeper
from outlast.checkpoint.plan import Local
from outlast.checkpoint.room import check_room, spelled
from outlast.checkpoint.slot import Slot
from outlast.checkpoint.stage import Layout
from outlast.errors import OutlastError

_SLACK_BYTES = 1 << 20
_PAUSE_S = 0.005
_TOO_LARGE = 1.25  # times what is needed: an arena that was made ahead and is larger is given back


class Slots:
    """Iterates over the slots, the one that was used longest ago first. Not for several threads at
    once."""

    def __init__(
        self, keeper: Keeper, arenas: int, save_s: float, when_busy: Literal["wait", "skip"]
    ) -> None:
        """Take `arenas` at most. `save_s` and `when_busy` are as for Engine."""
        self._keeper, self.arenas = keeper, arenas
        self._save_s, self._when_busy = save_s, when_busy
        self._slots: list[Slot] = []
        self._making: threading.Thread | None = None
        self.ahead: list[Slot] = []  # the thread's alone until that has ended
        self._wanted = True

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def reserve(self, pieces_bytes: int, blobs_bytes: int, device: Device | None) -> None:
        """Make the arenas that are missing, of this size, in a thread of their own.

        Returns at once, and does nothing where there are any, or they are being made. Where there
        is no room, the first save raises what it would have raised without this.
        """
        if self._slots or self._making or self.ahead:
            return
        count, size_bytes = self._missing(), arena_bytes(pieces_bytes, blobs_bytes)

        def work() -> None:
            try:
                check_room(count * size_bytes, f"{count} arenas of {spelled(size_bytes)}")
                while len(self.ahead) < count and self._wanted:
                    slot = Slot(self._keeper, size_bytes, device, lambda: self._wanted)
                    self.ahead.append(slot)
            except OutlastError:
                pass  # the first save tries again, and says it

        self._making = threading.Thread(target=work, name="outlast-arenas", daemon=True)
        self._making.start()

    def make(
        self, layout: Layout, table: Mapping[str, Local], blobs_bytes: int, device: Device | None
    ) -> None:
        """All arenas at once, so that a lack of room for one of them is told at the start; and one
        that there was no room for, again. Those that trainers before this one have left count.

        Raises StorageError when there is no room.
        """
        self._take_over(layout.size_bytes, blobs_bytes)
        missing = self._missing()
        if missing > 0:
            size_bytes = arena_bytes(layout.size_bytes, blobs_bytes)
            check_room(missing * size_bytes, f"{missing} arenas of {spelled(size_bytes)}")
            for _ in range(missing):
                self._slots.insert(0, Slot(self._keeper, size_bytes, device))
        for slot in self._slots:
            if not slot.bound:
                slot.bind(layout, table)

    def free(self, pieces_bytes: int, blobs_bytes: int, device: Device | None) -> Slot | None:
        """The slot that was used longest ago: in turn, so that all ranks hold the same versions.
        It is made anew where it is too small. None when it is not free in time."""
        deadline = time.monotonic() + self._save_s
        while (slot := self._slots[0]).busy:
            if self._when_busy == "skip" or time.monotonic() > deadline:
                return None
            time.sleep(_PAUSE_S)  # training waits anyway: the policy is to wait
        self._slots.remove(slot)
        if slot.arena.size_bytes < pieces_bytes + blobs_bytes:
            self._drop(slot)
            slot = Slot(self._keeper, arena_bytes(pieces_bytes, blobs_bytes), device)
        self._slots.append(slot)
        return slot

    @property
    def busy(self) -> bool:
        """Return whether the next save would wait."""
        return bool(self._slots) and self._slots[0].busy

    def join(self) -> None:
        """Wait until the arenas ahead are made."""
        if self._making:
            self._making.join()
            self._making = None

    def stop(self) -> None:
        """Make no arena ahead any more."""
        self._wanted = False
        self.join()

    def close(self) -> None:
        """Let go of the memory, which the keeper reads no more."""
        self.stop()
        for slots in (self._slots, self.ahead):
            while slots:
                slots.pop().close()

    def _missing(self) -> int:
        missing = self.arenas - len(self._slots) - len(self._keeper.older)
        return max(missing, not self._slots)

    def _take_over(self, pieces_bytes: int, blobs_bytes: int) -> None:
        """Wait for what `reserve` makes: to make the same here would take longer."""
        self.join()
        needed_bytes = pieces_bytes + blobs_bytes
        most_bytes = _TOO_LARGE * arena_bytes(pieces_bytes, blobs_bytes) + ALIGN_BYTES
        while self.ahead:
            slot = self.ahead.pop()
            useful = needed_bytes <= slot.arena.size_bytes <= most_bytes
            if useful and self._missing() > 0:
                self._slots.insert(0, slot)
            else:
                self._drop(slot)

    def _drop(self, slot: Slot) -> None:
        self._keeper.drop(slot.number)
        slot.close()


def arena_bytes(pieces_bytes: int, blobs_bytes: int) -> int:
    """With room for blobs that grow: a new arena costs far more than a save."""
    return pieces_bytes + 2 * blobs_bytes + _SLACK_BYTES
