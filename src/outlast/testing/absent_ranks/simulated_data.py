"""Data of a simulated rank: the worker's own deal of batches, without a loader.

It follows BatchLoop: a phase is a step, and at the beginning of each epoch the ranks agree on its
length in a phase. A place in the data is described as in a worker's slots.
"""

from __future__ import annotations

import json
from typing import Any, cast

from outlast.controller.recovery.rank_units import RankUnits, Units
from outlast.worker.groups import GroupRegistry
from outlast.worker.phases.rank_deal import RankDeal


class SimPresence:
    """Ranks of the connected generation."""

    def __init__(self, world: int) -> None:
        self.absent: frozenset[int] = frozenset()
        self.units = RankUnits(world)

    def set_units(self, world: int, units: Units) -> None:
        """Set the units; (): they stay."""
        if units:
            self.units = RankUnits(world, units)

    def of(self, ranks: range) -> tuple[int, ...]:
        """Return those of the ranks that are present."""
        return tuple(rank for rank in ranks if rank not in self.absent)


class SimGroups:
    """Groups of a rank, as its deal knows them."""

    def __init__(self, world: int, seat: int) -> None:
        self.world, self.seat = world, seat
        self.presence = SimPresence(world)


class SimDeal(RankDeal):
    """The deal of a rank whose loader can be dealt."""

    def set_rows(self, loader: Any) -> None:
        """Set the loader, which is not read; None: none."""
        self._loader = loader

    @property
    def row(self) -> int:
        """Return the row of the newest draw."""
        return self._newest[0]

    def shown(self) -> str:
        """Return the deal, as all ranks must have it."""
        if self._deal is None:
            return ""
        if self._rows is None:  # ranks have batches of their own, without numbers
            hand = self._deal.hand
            return f"{self._deal.step} {sorted(hand.batches)} {hand.idle}"
        return json.dumps(self._deal.place())


class SimData:
    """Place of a rank in its data."""

    def __init__(self, world: int, rows: int, seat: int) -> None:
        self.groups = SimGroups(world, seat)
        self.rows = rows
        self.step = 0
        self.epoch = -1
        self.kind = "epoch"  # of the next phase; of the newest one while `is_behind`
        self.is_behind = False  # a phase is complete, and the script has not gone on behind it
        self._deal = SimDeal(cast("GroupRegistry", self.groups), lambda _text, _key: None)
        self._deal.set_rows(rows or None)
        self._newest: dict[str, Any] = {}  # description of the newest draw
        self._agreed: frozenset[int] | None = None  # absent where an epoch's length was agreed on
        self._reads_again = False  # the batch of that draw, as a rank does that takes a place

    def commit(self) -> None:
        """Complete the phase."""
        self.step += self.kind == "step"
        self.is_behind = True

    def go_on(self) -> None:
        """Run the script's code behind the newest phase, up to the next one."""
        if not self.is_behind:
            return
        self.is_behind = False
        if self.kind == "epoch":
            self._begin_epoch()
        elif not self._draw():
            self.kind = "epoch"

    def _begin_epoch(self) -> None:
        """Begin an epoch with the ranks that have agreed on its length, and follow the changes."""
        self.kind, absent = "step", self._agreed
        self._agreed = None
        self.epoch += 1
        now = self.groups.presence.absent
        self._deal.begin_epoch(self.rows or None, self.step, now if absent is None else absent)
        self._draw()

    def _draw(self) -> bool:
        if not self._deal.go_on(self.step, skips=False):
            return False
        self._newest = {"step": self.step, "position": {"done": self._deal.row}}
        self._newest |= self._deal.place()
        return not self.rows or self._deal.is_dealt or self._deal.row < self.rows

    def follow(self, absent: frozenset[int], units: Units, step: int) -> bool:
        """Follow a change of the ranks that are present; return whether the place has changed."""
        self.groups.presence.set_units(self.groups.world, units)
        self.groups.presence.absent = absent
        if not (self._deal.follow(step) and self._newest):
            return False
        self._newest |= self._deal.place()
        return True

    def share(self) -> tuple[str, int, int | None, bytes]:
        """Return the kind of the next phase, its epoch, the number of its batch, and the deal."""
        number = None
        if self.kind == "step" and self.rows:
            units = self.groups.presence.units
            unit, place = units.place_of(self.groups.seat)
            own = self._deal.row * len(units.units) + unit
            number = self._deal.drawn if self._deal.is_dealt else own
            if number is not None:  # of the unit's batches, this rank's
                row, unit = divmod(number, len(units.units))
                number = row * self.groups.world + units.units[unit][place]
        deal = self._deal.shown() if self.kind == "step" else ""  # an epoch begins with another
        return self.kind, self.epoch, number, deal.encode()

    def pack(self, *, behind: bool) -> bytes:
        """Return the place; `behind` the next phase, which is not complete yet."""
        fields = {
            "step": self.step + (behind and self.kind == "step"),
            "epoch": self.epoch,
            "kind": self.kind,
            "behind": self.is_behind or behind,
            "absent": sorted(self.groups.presence.absent),
            "batch": self._newest,
        }
        return json.dumps(fields).encode()

    def take(self, packed: bytes) -> None:
        """Take a place."""
        fields = json.loads(packed)
        self.step, self.epoch, self.kind = fields["step"], fields["epoch"], fields["kind"]
        self.is_behind, self._newest = fields["behind"], fields["batch"]
        if self.is_behind and self.kind == "epoch":
            self._agreed = frozenset(fields["absent"])
        if self._newest:
            self._deal.take_place(self._newest, self.rows or None)
            self._reads_again = True

    def read_again(self) -> int:
        """Read the batch of the newest draw again, and return its number; 0 without numbers."""
        if not (self._reads_again and self._deal.is_dealt):
            return 0
        self._reads_again = False
        return self._deal.reads or 0
