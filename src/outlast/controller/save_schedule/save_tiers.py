"""Tiers of saves, and their measured costs."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

from outlast.config import AUTO
from outlast.errors import ConfigError, UsageError
from outlast.theory.failures import WEIGHT_FAILURES, RatePrior, preset
from outlast.theory.numerics import check_not_negative, check_positive, check_share

WINDOW = 9


class RunningMedian(msgspec.Struct, frozen=True):
    """Running median of the last `WINDOW` measured values, in seconds."""

    values: tuple[float, ...] = ()

    def add(self, value_s: float) -> RunningMedian:
        """Return this with one more value. Raises UsageError if it is negative, NaN or infinite."""
        check_not_negative("a measured time", value_s)
        return RunningMedian((*self.values, value_s)[-WINDOW:])

    @property
    def median_s(self) -> float:
        """Return the median in seconds; 0 without values."""
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
        """Return the costs after one more save that can be restored."""
        return replace(
            self,
            blocking=self.blocking.add(blocking_s),
            flush=self.flush.add(flush_s),
            drag=self.drag.add(drag_s),
        )

    def restored(self, restore_s: float) -> SaveCosts:
        """Return the costs after one more restore."""
        return replace(self, restore=self.restore.add(restore_s))

    @property
    def measured(self) -> bool:
        """Return whether at least one save has been timed."""
        return bool(self.blocking.values)

    @property
    def cost_s(self) -> float:
        """Return the training time lost to a save: blocking and drag, in seconds."""
        return self.blocking.median_s + self.drag.median_s


class RunMeasurements(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of a run. `failures`: those that restarted all ranks, `from_memory`, `from_disk`
    or else from the start. `restoring`: the tier of the restore under way."""

    since_ns: int = 0  # when this launch began
    step: RunningMedian = RunningMedian()
    memory: SaveCosts = SaveCosts()
    disk: SaveCosts = SaveCosts()
    failures: int = 0
    from_memory: int = 0
    from_disk: int = 0
    restoring: str = ""
    restoring_ns: int = 0  # time of the decision to restore; 0: no restore


Name = Literal["memory", "local", "durable"]
ORDER: tuple[Name, ...] = ("memory", "local", "durable")  # shallowest first
SURVIVES = {"memory": 0.9, "local": 0.95, "durable": 1.0}  # assumed, until failures say otherwise
STEPS_MAX = 1_000_000_000


class IntervalBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of an interval. If they conflict at the measured step time, the maximum wins. A save
    never begins before the last one is complete."""

    min_steps: int = 1
    max_steps: int = STEPS_MAX
    min_s: float = 0.0
    max_s: float = 3600.0


class SaveTier(msgspec.Struct, frozen=True, kw_only=True):
    """Storage tier of checkpoints. `survives`: prior share of failures after which this tier or a
    shallower one can be restored; None: `SURVIVES`. `restored`: number of failures restored from
    it so far."""

    name: Name
    costs: SaveCosts = SaveCosts()
    bounds: IntervalBounds = IntervalBounds()
    survives: float | None = None
    restored: int = 0

    @property
    def assumed(self) -> float:
        """Return the share of failures that the tier survives: as given, else the default of its
        name."""
        return SURVIVES[self.name] if self.survives is None else self.survives


class ScheduleInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a schedule. `tiers`: shallowest first. `failures`: those that needed a checkpoint
    (not those healed by a replica in place) in `exposure_device_s`, devices times seconds of
    running, over this job's life."""

    step: RunningMedian
    devices: int
    failures: int
    exposure_device_s: float
    tiers: tuple[SaveTier, ...]
    prior: RatePrior = msgspec.field(default_factory=lambda: preset("llama3-405b"))
    cheap_share: float = 0.01  # below this cost, memory saves are as frequent as possible

    def check(self) -> None:
        """Validate the inputs. Raises UsageError for impossible measurements, ConfigError for
        settings that no interval satisfies."""
        check_positive("step time (the median of Facts.step)", self.step.median_s)
        check_positive("devices", self.devices)
        check_not_negative("failures", self.failures)
        check_share("cheap_share", self.cheap_share)
        names = [tier.name for tier in self.tiers]
        if not names or names != [name for name in ORDER if name in names]:
            raise UsageError(
                f"tiers must be some of {', '.join(ORDER)}, each once and in this order, not"
                f" {', '.join(names) or 'none'}"
            )
        restored = sum(tier.restored for tier in self.tiers)
        if restored > self.failures:
            raise UsageError(f"{restored} restored failures exceed {self.failures} observed")
        for tier in self.tiers:
            _check(tier)
        assumed = [tier.assumed for tier in self.tiers]
        if assumed != sorted(assumed):
            raise ConfigError(
                f"survives must not fall from one tier to the next ({', '.join(names)}):"
                f" {', '.join(f'{one:g}' for one in assumed)}"
            )


def survival(tiers: tuple[SaveTier, ...]) -> dict[Name, float]:
    """Return the share of failures that each tier or a shallower one survives: the mean of a Beta
    posterior, whose prior weighs as much as `WEIGHT_FAILURES` failures."""
    failures, total = 0, sum(tier.restored for tier in tiers)
    shares: dict[Name, float] = {}
    for tier in tiers:
        failures += tier.restored
        shares[tier.name] = (WEIGHT_FAILURES * tier.assumed + failures) / (WEIGHT_FAILURES + total)
    return shares


def _check(tier: SaveTier) -> None:
    bounds = tier.bounds
    check_share(f"{tier.name}: survives", tier.assumed)
    check_not_negative(f"{tier.name}: restored", tier.restored)
    check_not_negative(f"{tier.name}: min_s", bounds.min_s)
    check_positive(f"{tier.name}: max_s", bounds.max_s)
    if not 1 <= bounds.min_steps <= bounds.max_steps or bounds.min_s > bounds.max_s:
        raise ConfigError(
            f"{tier.name}: no interval lies within {bounds.min_steps} to {bounds.max_steps} steps"
            f" (at least 1) and {bounds.min_s:g} to {bounds.max_s:g} s"
        )


class SavePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Save policy. `memory`, `disk`: committed steps between copies in memory and between
    checkpoints on disk; 0: only on request; AUTO: by the schedule.

    `durable`: checkpoints are copied to storage that survives this host. `stop`: a failed save ends
    the run.
    """

    memory: int = 0
    disk: int = 0
    durable: bool = False
    stop: bool = False

    @property
    def auto(self) -> bool:
        """Return whether any interval is left to the schedule."""
        return AUTO in (self.memory, self.disk)
