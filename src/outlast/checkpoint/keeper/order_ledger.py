"""Orders of a trainer and their outcomes. Pure: the time is an argument.

States of a save:

| state    | entered                                     | left                                  |
|----------|---------------------------------------------|---------------------------------------|
| unsent   | `add`; `died`, when its keeper is lost       | `unsent` returns its frame            |
| sent     | `unsent`                                    | the keeper's outcome                  |
| written  | "written" for a save with a commit record   | "committed" or "failed"               |
| given up | `overdue`: reported as failed               | the keeper answers or dies            |
| ended    | the last outcome; too many deaths (`died`)  | kept in `last` for `OUTCOMES_MAX`     |
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from outlast.checkpoint.keeper.keeper_frames import Outcome, SaveOrder, Write
from outlast.errors import StorageError, UsageError

RESTARTS_MAX = 3
ORDERS_MAX = 16
OUTCOMES_MAX = 1024  # bound of unread outcomes, and of `last`
GRACE_S = 2.0  # after a deadline: the keeper's own error is more precise


@dataclass
class _Save:
    """A pending order. `given_up`: it was reported as failed; the keeper may still execute it."""

    order: SaveOrder
    stamp: int
    due: float
    attempt: int = 0
    sent: bool = False
    written: bool = False
    given_up: bool = False


@dataclass
class OrderLedger:
    """Saves from their order to their last outcome.

    `owner` names the keeper in messages; `copies`: it also reports the number of peers that hold
    each version.
    """

    owner: str
    copies: bool = False
    unread: deque[Outcome] = field(default_factory=lambda: deque(maxlen=OUTCOMES_MAX))
    final_outcomes: OrderedDict[int, Outcome] = field(default_factory=OrderedDict)
    _saves: dict[int, _Save] = field(default_factory=dict)
    _copying: dict[int, float] = field(default_factory=dict)  # deadline of each transfer

    def add(self, order: SaveOrder, stamp: int, now: float) -> None:
        """Add an order. Raises UsageError or StorageError when it cannot be accepted."""
        if order.save in self._saves or order.save in self.final_outcomes:
            raise UsageError(f"save number {order.save} was used before; use a higher one")
        if len(self._saves) >= ORDERS_MAX:
            raise StorageError(
                f"{ORDERS_MAX} saves have not ended yet, from {min(self._saves)} on; nothing of"
                f" save {order.save} was written; save less often, or check the storage"
            )
        self._saves[order.save] = _Save(order, stamp, now + order.deadline_s)

    def pending_order(self, save: int) -> SaveOrder | None:
        """Return the order of a pending save, else None."""
        pending = self._saves.get(save)
        return pending.order if pending else None

    def take_unread(self) -> list[Outcome]:
        """Return the outcomes since the last call, in order."""
        news, self.unread = list(self.unread), deque(maxlen=OUTCOMES_MAX)
        return news

    def is_written(self, save: int) -> bool:
        """Return whether this rank's part of a pending save is on the disk."""
        return save in self._saves and self._saves[save].written

    @property
    def open(self) -> list[int]:
        """Return the pending saves, in order."""
        return sorted(number for number, save in self._saves.items() if not save.given_up)

    def is_busy(self, arena: int) -> bool:
        """Return whether the keeper may still read the arena."""
        return any(s.order.arena == arena and not s.written for s in self._saves.values())

    def is_copying(self, now: float) -> bool:
        """Return whether a version is still being sent to peers."""
        return any(due > now for due in self._copying.values())

    def take_unsent(self, now: float) -> list[Write]:
        """Return the frames of unsent orders, and mark these as sent."""
        frames = []
        for number in self.open:
            save = self._saves[number]
            if not save.sent:
                save.sent = True
                if self.copies and not save.written:
                    self._copying[number] = save.due
                frames.append(
                    Write(
                        order=save.order,
                        stamp=save.stamp,
                        attempt=save.attempt,
                        written=save.written,
                        deadline_s=max(0.0, save.due - now),
                    )
                )
        return frames

    def refuse(self, save: int, why: str) -> None:
        """Fail an order that cannot be sent."""
        self._copying.pop(save, None)
        self._fail(self._saves.pop(save), why)

    def record(self, outcome: Outcome) -> None:
        """Record an outcome reported by the keeper."""
        if outcome.kind == "copied":
            self._copying.pop(outcome.save, None)
            self.unread.append(outcome)
            return
        save = self._saves.get(outcome.save)
        if not save:
            return
        ended = outcome.kind != "written" or not save.order.commit
        repeated = outcome.kind == "written" and save.written
        save.written = True
        if ended:
            del self._saves[outcome.save]
        if not save.given_up and not repeated:
            self._report(outcome, ended)

    def next_deadline(self) -> float | None:
        """Return the time of the next call of `overdue`; None without pending saves."""
        dues = [self._saves[number].due + GRACE_S for number in self.open]
        return min(dues, default=None)

    def fail_overdue(self, now: float) -> bool:
        """Fail saves whose deadline has passed; return whether there were any.

        Their arenas stay busy until the keeper has answered, or is dead.
        """
        late = [number for number in self.open if self._saves[number].due + GRACE_S <= now]
        for number in late:
            save = self._saves[number]
            self._fail(
                save,
                f"{self.owner} neither finished nor answered within {save.order.deadline_s:g} s:"
                " the file system hangs, or the process is stopped",
            )
            save.given_up = True
        return bool(late)

    def keeper_died(self, how: str) -> None:
        """Record the death of the keeper: pending saves are sent to its successor.

        A save that was pending at too many deaths fails.
        """
        self._copying.clear()
        for number, save in list(self._saves.items()):
            save.attempt += 1
            save.sent = False
            if save.given_up:
                del self._saves[number]
            elif save.attempt > RESTARTS_MAX:
                del self._saves[number]
                self._fail(
                    save,
                    f"{self.owner} died while writing it, and so did {RESTARTS_MAX} successors; the"
                    f" last one {how}",
                )

    def _fail(self, save: _Save, why: str) -> None:
        place = save.order.manifest.place
        error = (
            f"the save of step {place.step} in {save.order.root} failed: {why}; the training and"
            " older checkpoints are untouched"
        )
        self._report(
            Outcome(save=save.order.save, place=place, kind="failed", error=error), ended=True
        )

    def _report(self, outcome: Outcome, ended: bool) -> None:
        self.unread.append(outcome)
        if ended:
            self.final_outcomes[outcome.save] = outcome
            if len(self.final_outcomes) > OUTCOMES_MAX:
                self.final_outcomes.popitem(last=False)
