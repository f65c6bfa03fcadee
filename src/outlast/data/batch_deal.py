"""Deal of an epoch's batches among the ranks that are present.

A rank's loader gives `rows` batches an epoch. Batch `row` of rank `r` has the number
`row * world + r`. While all ranks are present each takes its own. When ranks have left, the numbers
are dealt in order, one a step to each rank that is present, so that each batch of the epoch is
trained exactly once, in fewer batches a step and more steps.

The membership changes inside a step that all ranks know. That step is still trained with the
batches that it was begun with: those of ranks that have left are dealt first in the next step, and
a rank that has come back is idle in it. Every rank computes the same deal from the same changes.
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

    def with_idle(self, idle: tuple[int, ...]) -> Hand:
        """Return the hand with these idle ranks."""
        read = self.read if self.read != _NONE or not idle else min(self.batches.values())
        return self._replace(idle=idle, read=read)


class BatchDeal:
    """Deal of one epoch. `step`: of the newest hand, counted by the run."""

    def __init__(self, world: int, rows: int | None, *, row: int, step: int) -> None:
        """All ranks are present, and the hand of `step` is their own batches of `row`. `rows`: of
        each rank; None where batches cannot be dealt, so that each rank has its own for ever."""
        self.world, self.rows = world, rows
        self.step = step
        self.present: tuple[int, ...] = tuple(range(world))
        self._owed: list[int] = []
        first = row * world
        self._next = first + world
        self.hand = Hand({rank: first + rank for rank in range(world)})

    @classmethod
    def before_epoch(cls, world: int, rows: int | None, *, step: int) -> BatchDeal:
        """Return the deal of an epoch before its first hand, which is that of the next step."""
        deal = cls(world, rows, row=-1, step=step)
        deal.hand = Hand({})
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
        if self.rows is None:
            self.hand = Hand(dict.fromkeys(self.present, _NONE))
            return self.hand
        batches: dict[int, int] = {}
        idle: list[int] = []
        for rank in self.present:
            if self._owed:
                batches[rank] = self._owed.pop(0)
            elif self._next < self.world * self.rows:
                batches[rank] = self._next
                self._next += 1
            else:
                idle.append(rank)
        self.hand = Hand(batches).with_idle(tuple(idle) if batches else ())
        return self.hand

    def change(self, step: int, present: Iterable[int]) -> None:
        """Change the ranks that are present inside `step`, which is that of the newest hand or the
        one after it."""
        if step > self.step:
            self.deal()
        assert step == self.step, f"a change in step {step} of a deal at step {self.step}"
        self.present = tuple(sorted(present))
        hand, here = self.hand, set(self.present)
        gone = [number for rank, number in hand.batches.items() if rank not in here]
        kept = {rank: number for rank, number in hand.batches.items() if rank in here}
        if self.rows is not None:
            self._owed = sorted([*gone, *self._owed])
        was_idle = [rank for rank in hand.idle if rank in here]
        if gone and not kept and was_idle:  # one that was idle trains what it has read
            kept = {was_idle[0]: hand.read}
            if self.rows is not None:
                self._owed.remove(hand.read)
        if hand.batches:
            hand = hand._replace(batches=kept or hand.batches)
            hand = hand.with_idle(tuple(rank for rank in self.present if rank not in kept))
        self.hand = hand._replace(batches=kept)

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
            "owed": list(self._owed),
            "next": self._next,
            "batches": [[rank, number] for rank, number in self.hand.batches.items()],
            "idle": list(self.hand.idle),
            "read": self.hand.read,
        }

    @classmethod
    def at(cls, place: Mapping[str, Any]) -> BatchDeal:
        """Return the deal of a place."""
        deal = cls(place["world"], place["rows"], row=0, step=place["step"])
        deal.present = tuple(place["present"])
        deal._owed = list(place["owed"])
        deal._next = place["next"]
        batches: list[tuple[int, int]] = place["batches"]
        deal.hand = Hand(dict(batches), tuple(place["idle"]), place["read"])
        return deal
