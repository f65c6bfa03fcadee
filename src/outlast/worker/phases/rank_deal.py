"""Batches of this rank's loop while ranks are absent (data/batch_deal.py).

Batches are dealt to units of ranks that leave together: number k of a deal is a batch for each rank
of a unit, or one that they share, as in the sampler's own places (rank_units.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from outlast.controller.recovery.rank_units import UnitPlace
from outlast.data.batch_deal import BatchDeal, Hand
from outlast.data.counted_source import Codec
from outlast.data.dealt_loader import LoaderShares, open_shares, why_not_dealt
from outlast.data.sampler_copies import ShareOrder
from outlast.errors import UnsupportedError
from outlast.worker.groups import GroupRegistry

_UNDEALT = "the loader's batches cannot be dealt to other ranks: "


class RankDeal:
    """Deal of one rank: begun when ranks leave, or with an epoch while they are absent, and over
    with the epoch. Without a loader each rank that is present has its own batches."""

    def __init__(self, groups: GroupRegistry, note_once: Callable[[str, str], None]) -> None:
        self._groups, self._note_once = groups, note_once
        self._needs = ""  # why no rank may leave
        self._unequal = ""  # why the ranks' batches of this epoch cannot be read by others
        self.are_compared = True  # orders of ranks: some may leave
        self._order = ShareOrder()  # of this epoch, of a rank whose batches are as they were then
        self.drawn: int | None = None  # number of the newest batch; None: idle
        self.reads: int | None = None  # of the batch that is read for it; None: there is none
        self._loader: Any = None
        self._rows: int | None = None
        self._newest = -1, -1  # row in the epoch, and step, of the newest draw
        self._had: tuple[int, ...] | None = None  # units with a batch of that draw; None: all
        self._deal: BatchDeal | None = None
        self._shares: LoaderShares | None = None
        self._epoch = 0
        self._is_read = False  # this epoch's shares
        self._has_begun = False
        self._agreed: frozenset[int] | None = None  # absent when the epoch's length was agreed on

    def set_loader(self, loader: Any, codec: Codec, *, sets_epochs: bool) -> None:
        """Set the loader of the loop. `sets_epochs`: its sampler's epoch is set with each epoch."""
        self._loader = loader
        self._shares = open_shares(loader, codec, sets_epochs=sets_epochs)
        if why := why_not_dealt(loader):
            self._needs = _UNDEALT + why

    @property
    def sampler(self) -> tuple[int, ...]:
        """Return `num_replicas` and `rank` of the loader's sampler; () without one."""
        return () if self._shares is None else self._shares.place

    @property
    def needs(self) -> str:
        """Return why no rank may leave; "" if one may."""
        return self._needs or self._unequal

    def order(self, epoch: int) -> ShareOrder:
        """Return the order of this rank's batches in an epoch, which all ranks compare."""
        if self._shares is None or not self.are_compared:
            return ShareOrder()
        return self._shares.order(epoch)

    def shortest(self, length: int | None, epoch: int) -> int | None:
        """Return the length of an epoch on this rank, or on an absent one whose is shorter."""
        presence = self._groups.presence
        if length is None or self._shares is None or not presence.absent or self.needs:
            return length
        replicas, units = self._shares.place[0], presence.units
        places = (units.place_of(rank) for rank in presence.absent)
        ranks = {units.sampler_rank(replicas, place.unit, place.place) for place in places}
        return min(length, *(self._shares.length(rank, epoch) for rank in ranks))

    def set_order(self, epoch: int, order: ShareOrder, unequal: str) -> None:
        """Set the order of this rank's batches in an epoch. `unequal`: why others cannot read
        them, by the orders of all."""
        self._epoch, self._order = epoch, order
        self._unequal = _UNDEALT + unequal if unequal else ""

    def begin_epoch(self, length: int | None, step: int, absent: Iterable[int]) -> None:
        """Begin an epoch of `length` batches a rank, before the draw for `step`. `absent`: when the
        ranks agreed on that; a new worker may begin the epoch later, with others."""
        self._has_begun, self._agreed = True, frozenset(absent)
        self._rows = length if self._loader is not None else None
        self._newest = -1, step - 1
        self._deal = self._had = None
        self._is_read = False
        if self._agreed:
            here = (rank for rank in range(self._groups.world) if rank not in self._agreed)
            units = self._groups.presence.units
            self._deal = BatchDeal.before_epoch(len(units.units), self._rows, step=step - 1)
            self._deal.present = units.numbers(here)

    def take_place(self, place: dict[str, Any], length: int | None) -> bool:
        """Take the place of a draw from its description; return whether its batch was dealt."""
        self.begin_epoch(length, place["step"], ())
        self._agreed = None
        self._epoch, self._unequal = place.get("epoch", 0), place.get("unequal", "")
        self._order = ShareOrder(*place.get("order", ()))
        if self._shares is not None and not self._shares.is_certain and not self._order.replicas:
            self._unequal = _UNDEALT + "ranks compare their orders when the next epoch begins"
        self._newest = place["position"].get("done", 0), place["step"]
        self.drawn, self._deal = place.get("drawn"), None
        if place.get("deal"):
            self._deal = BatchDeal.at(place["deal"])
            units = tuple(map(tuple, place.get("units", ())))
            self._groups.presence.set_units(self._groups.world, units)
            self._had = tuple(place["had"]) if "had" in place else None
        self._note_read()
        return self._deal is not None and self._rows is not None

    def place(self) -> dict[str, Any]:
        """Return the place of the newest draw in the deal, as plain data; {} without one."""
        found: dict[str, Any] = {"unequal": self._unequal} if self._unequal else {}
        if self._order.replicas:
            found["order"] = [self._order.replicas, self._order.rank, self._order.own]
        if not self._deal:
            return found
        units = self._groups.presence.units
        found |= {"deal": self._deal.place(), "drawn": self.drawn}
        found |= {"had": [*self._had]} if self._had is not None else {}
        return found | ({"units": [*map(list, units.units)]} if units.size > 1 else {})

    @property
    def is_dealt(self) -> bool:
        """Return whether batches come from the deal, and not from the rank's own loader."""
        return self._deal is not None and self._rows is not None

    def go_on(self, step: int, *, skips: bool) -> bool:
        """Go on to the draw for `step`; return whether there is one. `skips`: the batch before it
        had no phase."""
        row, _ = self._newest
        self._newest = row + 1, step
        if skips:
            self._needs = "the loop draws batches without a phase for each"
        if self._agreed != self._groups.presence.absent and self._agreed is not None:
            if self._deal is not None:
                self._deal.deal()
            self.follow(step)
        self._agreed = None
        if self._deal is None:
            self._had = None
            return True
        if skips:
            raise UnsupportedError(
                "the loop draws a batch without a phase for the one before, while ranks are"
                " absent: their batches cannot be dealt; take shrink out of the policy's rungs"
            )
        if self._deal.step < step:
            if self._deal.is_over:
                return False
            self._deal.deal()
        self._take_hand(self._deal.hand)
        return bool(self._deal.hand.batches)

    def load(self) -> Any:
        """Return the newest batch of the deal; for an idle rank, another's. Raises StopIteration if
        the epoch has no other."""
        if self.reads is None:
            raise StopIteration
        assert self._shares is not None, "only a loader with shares is dealt"
        if not self._is_read:
            self._begin_reading(self._shares)
        units = self._groups.presence.units
        row, unit = divmod(self.reads, len(units.units))
        replicas, _ = self.sampler
        return self._shares.load(row, units.sampler_rank(replicas, unit, self._own.place))

    def _begin_reading(self, shares: LoaderShares) -> None:
        shares.begin(self._epoch)
        order, self._is_read = self._order, True
        if order.own and shares.digest(order.rank) != order.own:
            raise UnsupportedError(
                f"batches of rank {order.rank} of the sampler are not what they were when epoch"
                f" {self._epoch} began, so that those of absent ranks cannot be dealt: its data or"
                " settings were changed in the epoch; change them between two epochs"
            )
        if self._loader.num_workers:
            self._note_once(
                "batches are read in the main process to the end of this epoch, since ranks are or"
                " were absent",
                "dealt",
            )

    def follow(self, step: int) -> bool:
        """Follow a change of the ranks that are present, at a place with `step` committed steps;
        return whether there is a deal."""
        if not self._has_begun:
            return False
        row, newest = self._newest
        world, rows = len(self._groups.presence.units.units), self._rows
        if self._deal is None and self._groups.presence.absent:
            if row < 0:
                self._deal = BatchDeal.before_epoch(world, rows, step=step - 1)
            else:
                is_end = rows is not None and row >= rows  # the newest draw has found the end
                at, on = (rows - 1, newest - 1) if is_end and rows else (row, newest)
                self._deal = BatchDeal(world, rows, row=at, step=on)
                self.drawn = None if is_end else self._deal.hand.of(self._own.unit)
                self.reads = self.drawn  # a new worker reads it again behind the change
        if self._deal is not None:
            if self._deal.world != world:
                raise UnsupportedError(
                    f"the batches of this epoch are dealt to {self._deal.world} units of ranks, and"
                    f" the phases of the script need {world} others; nothing was dealt"
                )
            here = self._present
            self._deal.change(step, here)
            if self._deal.step == newest:
                self._take_hand(self._deal.hand)
            else:  # in a later phase of the same batch
                had = range(world) if self._had is None else self._had
                self._had = tuple(unit for unit in had if unit in here)
        return self._deal is not None

    def _take_hand(self, hand: Hand) -> None:
        self.drawn, self._had = hand.of(self._own.unit), tuple(hand.batches)
        self._note_read()

    def _note_read(self) -> None:
        """Note the batch that is read for the newest draw."""
        hand = self._deal.hand if self._deal is not None else None
        is_idle = self.drawn is None and hand is not None and bool(hand.batches)
        self.reads = hand.read if hand is not None and is_idle else self.drawn

    @property
    def is_idle(self) -> bool:
        """Return whether this rank has no batch of its own in the newest draw."""
        return self._deal is not None and self._groups.seat in self.idle()

    def idle(self) -> frozenset[int]:
        """Return the ranks that are present without a batch of the newest draw."""
        if self._had is None:
            return frozenset()
        units = self._groups.presence.units.units
        idle = (units[number] for number in self._present if number not in self._had)
        return frozenset(rank for unit in idle for rank in unit)

    @property
    def _own(self) -> UnitPlace:
        return self._groups.presence.units.place_of(self._groups.seat)

    @property
    def _present(self) -> tuple[int, ...]:
        presence = self._groups.presence
        return presence.units.numbers(presence.of(range(self._groups.world)))
