"""Measured costs of saves and steps, as medians of the last few."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from outlast.theory.argument_checks import check_not_negative

WINDOW = 9


class RunningMedian(msgspec.Struct, frozen=True):
    """The last `WINDOW` values of something measured, in seconds."""

    values: tuple[float, ...] = ()

    def add(self, value_s: float) -> RunningMedian:
        """With one more. Raises UsageError for what no clock measures: negative, NaN, infinite."""
        check_not_negative("a measured time", value_s)
        return RunningMedian((*self.values, value_s)[-WINDOW:])

    @property
    def median_s(self) -> float:
        """0 where nothing has been measured."""
        ordered, count = sorted(self.values), len(self.values)
        return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2 if count else 0.0


class SaveCosts(msgspec.Struct, frozen=True):
    """Costs of the saves of one tier, in seconds.

    `blocking`: training blocked, beyond the shallower tiers' saves of the same step. `flush`: from
    there until the save can be restored. `drag`: total slow-down of the steps meanwhile. `restore`:
    from the decision to restore until every rank has the state.
    """

    blocking: RunningMedian = RunningMedian()
    flush: RunningMedian = RunningMedian()
    drag: RunningMedian = RunningMedian()
    restore: RunningMedian = RunningMedian()

    def saved(self, *, blocking_s: float, flush_s: float = 0.0, drag_s: float = 0.0) -> SaveCosts:
        """After one more save, once it can be restored."""
        return replace(
            self,
            blocking=self.blocking.add(blocking_s),
            flush=self.flush.add(flush_s),
            drag=self.drag.add(drag_s),
        )

    def restored(self, restore_s: float) -> SaveCosts:
        """After one more restore."""
        return replace(self, restore=self.restore.add(restore_s))

    @property
    def measured(self) -> bool:
        """Return whether at least one save has been timed."""
        return bool(self.blocking.values)

    @property
    def cost_s(self) -> float:
        """Return the time that a save takes from training: blocking and drag, in seconds."""
        return self.blocking.median_s + self.drag.median_s


class RunMeasurements(msgspec.Struct, frozen=True, kw_only=True):
    """`failures`: those after which all began again; so many of them `from_memory` and
    `from_disk`, the rest from nothing. `restoring`: where the one that is under way begins."""

    since_ns: int = 0  # when this launch began
    step: RunningMedian = RunningMedian()
    memory: SaveCosts = SaveCosts()
    disk: SaveCosts = SaveCosts()
    failures: int = 0
    from_memory: int = 0
    from_disk: int = 0
    restoring: str = ""
    restoring_ns: int = 0  # when it was decided to begin again; 0: all is well
