"""Deal of an epoch's batches among the ranks that are present.

A rank's loader gives `rows` batches an epoch. Batch `row` of rank `r` has the number
`row * world + r`. Where ranks leave in units, `world` is the number of units, and a unit is a rank
here. While all ranks are present each takes its own. When ranks have left, the numbers
are dealt in order, one a step to each rank that is present, so that each batch of the epoch is
trained exactly once, in fewer batches a step and more steps.

The membership changes inside a step that all ranks know. That step is still trained with the
batches that were dealt at its beginning: those of ranks that have left are dealt first in the next
step, and ranks that were absent then are idle in it. A hand follows from what was dealt and who is
present now, and not from the changes between: a new worker of a rank may know an older place of the
same step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_NONE = -1


class Hand(NamedTuple):
    """Batches of one step, by rank. Ranks that are present and idle have none; each of them has
    read batch `read`, which another rank trains."""

    batches: Mapping[int, int]
    idle: tuple[int, ...] = ()
    read: int = _NONE

    def of(self, rank: int) -> int | None:
        """Return the number of a rank's batch; None if it is idle."""
        return self.batches.get(rank)


class BatchDeal:
    """Deal of one epoch. `step`: of the newest hand, counted by the run."""

    def __init__(self, world: int, rows: int | None, *, row: int, step: int) -> None:
        """All ranks are present, and the hand of `step` is their own batches of `row`. `rows`: of
        each rank; None where batches cannot be dealt, so that each rank has its own for ever."""
        self.world, self.rows = world, rows
        self.step = step
        self.present: tuple[int, ...] = tuple(range(world))
        first = row * world
        self._next = first + world
        self._dealt: dict[int, int] = {rank: first + rank for rank in range(world)}
        self._rest: tuple[int, ...] = ()  # owed beside what was dealt
        self._owed: tuple[int, ...] = ()
        self.hand = Hand({})
        self._look()

    @classmethod
    def before_epoch(cls, world: int, rows: int | None, *, step: int) -> BatchDeal:
        """Return the deal of an epoch before its first hand, which is that of the next step."""
        deal = cls(world, rows, row=-1, step=step)
        deal._dealt = {}
        deal._look()
        return deal

    @property
    def is_over(self) -> bool:
        """Return whether no batch of the epoch is left for the step after the newest hand."""
        return self.rows is not None and not self._owed and self._next >= self.world * self.rows

    @property
    def is_plain(self) -> bool:
        """Return whether the next hand is each rank's own next batch, with all ranks present."""
        return len(self.present) == self.world and not self._owed and self._next % self.world == 0

    def deal(self) -> Hand:
        """Deal the batches of the next step, and return them."""
        self.step += 1
        self._dealt, owed = {}, [*self._owed]
        for rank in self.present:
            if self.rows is None:
                self._dealt[rank] = _NONE
            elif owed:
                self._dealt[rank] = owed.pop(0)
            elif self._next < self.world * self.rows:
                self._dealt[rank] = self._next
                self._next += 1
        self._rest = tuple(owed)
        return self._look()

    def change(self, step: int, present: Iterable[int]) -> None:
        """Change the ranks that are present inside `step`, which is that of the newest hand or the
        one after it."""
        if step > self.step:
            self.deal()
        assert step == self.step, f"a change in step {step} of a deal at step {self.step}"
        self.present = tuple(sorted(present))
        self._look()

    def _look(self) -> Hand:
        """Compute the hand of the step, and what is owed behind it."""
        if not self._dealt:
            self._owed, self.hand = self._rest, Hand({})
            return self.hand
        read = min(self._dealt.values())  # by ranks that were absent when it was dealt
        kept = {rank: self._dealt[rank] for rank in self.present if rank in self._dealt}
        kept = kept or {self.present[0]: read}
        idle = tuple(rank for rank in self.present if rank not in kept)
        if self.rows is not None:
            trained = {*kept.values()}
            dropped = (number for number in self._dealt.values() if number not in trained)
            self._owed = tuple(sorted([*dropped, *self._rest]))
        self.hand = Hand(kept, idle, read if idle else _NONE)
        return self.hand

    def weight(self, rank: int) -> float:
        """Return the factor of a rank's contribution to sums in the step of the newest hand: sums
        stay those of the whole world, as though each missing batch had contributed the mean."""
        working = len(self.hand.batches)
        if rank not in self.hand.batches or not working:
            return 0.0
        return self.world / working

    def place(self) -> dict[str, Any]:
        """Return the deal as plain data."""
        return {
            "world": self.world,
            "rows": self.rows,
            "step": self.step,
            "present": list(self.present),
            "rest": list(self._rest),
            "next": self._next,
            "dealt": [[rank, number] for rank, number in self._dealt.items()],
        }

    @classmethod
    def at(cls, place: Mapping[str, Any]) -> BatchDeal:
        """Return the deal of a place."""
        deal = cls(place["world"], place["rows"], row=0, step=place["step"])
        deal.present = tuple(place["present"])
        deal._rest = tuple(place["rest"])
        deal._next = place["next"]
        dealt: list[tuple[int, int]] = place["dealt"]
        deal._dealt = dict(dealt)
        deal._look()
        return deal
