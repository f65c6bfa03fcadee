"""Batches of this rank's loop while ranks are absent (data/batch_deal.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outlast.data.batch_deal import BatchDeal
from outlast.data.dealt_loader import DealtLoader, why_not_dealt
from outlast.errors import UnsupportedError
from outlast.worker.groups import GroupRegistry


class RankDeal:
    """Deal of one rank: begun when ranks leave, or with an epoch while they are absent, and over
    with the epoch. Without a loader each rank that is present has its own batches."""

    def __init__(self, groups: GroupRegistry, note_once: Callable[[str, str], None]) -> None:
        self._groups, self._note_once = groups, note_once
        self.needs = ""  # why no rank may leave
        self.drawn: int | None = None  # number of the newest batch
        self._loader: Any = None
        self._rows: int | None = None
        self._newest = -1, -1  # row in the epoch, and step, of the newest draw
        self._deal: BatchDeal | None = None
        self._dealt: DealtLoader | None = None
        self._has_begun = False

    def set_loader(self, loader: Any) -> None:
        """Set the loader of the loop."""
        self._loader = loader
        if why := why_not_dealt(loader, self._groups.world):
            self.needs = f"the loader's batches cannot be dealt to other ranks: {why}"

    def begin_epoch(self, length: int | None, step: int) -> None:
        """Begin an epoch of `length` batches a rank, before the draw for `step`."""
        self._has_begun = True
        self._rows = length if self._loader is not None else None
        self._newest = -1, step - 1
        self._deal = self._dealt = None
        if self._groups.presence.absent:
            self._deal = self._before_epoch(step)
            self._deal.present = self._present

    def take_place(self, place: dict[str, Any], length: int | None) -> bool:
        """Take the place of a draw from its description; return whether its batch was dealt."""
        self.begin_epoch(length, place["step"])
        self._newest = place["position"].get("done", 0), place["step"]
        self.drawn, self._deal = place.get("drawn"), None
        if place.get("deal"):
            self._deal = BatchDeal.at(place["deal"])
        return self._deal is not None and self._rows is not None

    def place(self) -> dict[str, Any]:
        """Return the place of the newest draw in the deal, as plain data; {} without one."""
        return {"deal": self._deal.place(), "drawn": self.drawn} if self._deal else {}

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
            self.needs = "the loop draws batches without a phase for each"
        if self._deal is None:
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
        self.drawn = self._deal.hand.of(self._groups.seat)
        return bool(self._deal.hand.batches)

    def load(self) -> Any:
        """Return the newest batch of the deal; for an idle rank, another's."""
        deal = self._deal
        assert deal is not None
        if self._dealt is None:
            self._dealt = DealtLoader(self._loader, self._groups.world)
            if self._loader.num_workers:
                self._note_once(
                    "batches are read in the main process to the end of this epoch, since ranks"
                    " are or were absent",
                    "dealt",
                )
        return self._dealt.load(self.drawn if self.drawn is not None else deal.hand.read)

    def follow(self, step: int) -> bool:
        """Follow a change of the ranks that are present, at a place with `step` committed steps;
        return whether there is a deal."""
        if not self._has_begun:
            return False
        if self._deal is None and self._groups.presence.absent:
            row, newest = self._newest
            self._deal = self._before_epoch(step)
            if row >= 0:
                self._deal = BatchDeal(self._groups.world, self._rows, row=row, step=newest)
        if self._deal is not None:
            self._deal.change(step, self._present)
            if self._deal.step == self._newest[1]:
                self.drawn = self._deal.hand.of(self._groups.seat)
        return self._deal is not None

    @property
    def is_idle(self) -> bool:
        """Return whether this rank has no batch of its own in the newest step."""
        return self._deal is not None and self._groups.seat in self._deal.hand.idle

    def idle(self, step: int) -> frozenset[int]:
        """Return the ranks without a batch in a step."""
        deal = self._deal
        return frozenset(deal.hand.idle) if deal is not None and deal.step == step else frozenset()

    @property
    def _present(self) -> tuple[int, ...]:
        return self._groups.presence.of(range(self._groups.world))

    def _before_epoch(self, step: int) -> BatchDeal:
        return BatchDeal.before_epoch(self._groups.world, self._rows, step=step - 1)
