"""Save intervals of each tier, from the costs of saves and the rates of failures.

Pure and deterministic: the controller decides, and all ranks receive the intervals. The
formulas are those of `outlast.theory`; `explain` gives the reasons.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import msgspec

from outlast.controller.save_schedule.save_tiers import (
    STEPS_MAX,
    Name,
    SaveTier,
    ScheduleInputs,
    survival,
)
from outlast.theory.failures import RatePosterior, job_mtbf_s, posterior
from outlast.theory.intervals import POINT, REGIME_MAX, efficiency, flat_zone
from outlast.theory.levels import Level, pattern

NEVER_S = 1e9  # 31 years: an infinite interval, since wire formats lack infinity
FIRST_S = 300.0  # until a tier's first save has been timed
STAY_SHARE = 0.1  # a step count is kept if its waste exceeds the least waste by at most this share
STAY_CHEAP = 1.5  # factor on the affordable cost of a tier that already saves as often as possible

Reason = Literal["optimum", "bounds", "flush", "cheap", "kept", "covered", "unmeasured"]


class IntervalChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Interval of one tier and its reason. Seconds; `NEVER_S` means infinite.

    `reason`: the optimum · the nearest to it that the bounds allow, or that leaves time to flush ·
    as often as can be, since that is cheap · kept from before, since the optimum is hardly better ·
    goes with the next deeper tier, which covers its failures · no save has been timed yet.
    """

    tier: Name
    every_steps: int
    reason: Reason
    optimum_s: float  # of work between two saves, before bounds and rounding
    flat_s: tuple[float, float]  # where waste is within one point of the optimum's
    mtbf_s: float  # between failures that are restored from this tier
    survives: float  # share of failures, by this tier or a shallower one


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """The intervals of all tiers, shallowest first."""

    choices: tuple[IntervalChoice, ...]
    rate: RatePosterior
    mtbf_s: float  # the job's
    step_s: float

    def due(self, step: int) -> tuple[Name, ...]:
        """Return the tiers that save after committed step `step` (from 1), shallowest first."""
        return tuple(one.tier for one in self.choices if step > 0 and step % one.every_steps == 0)


def decide(facts: ScheduleInputs, before: Schedule | None = None) -> Schedule:
    """Return the intervals for `facts`. Those of `before` are kept if a change gains little, so
    that measurement noise does not change them.

    A deeper tier's interval is a multiple of the shallower one's if bounds allow it, since one copy
    then serves both. Raises UsageError and ConfigError for invalid `facts`.
    """
    facts.check()
    rate = posterior(facts.prior, facts.failures, facts.exposure_device_s)
    mtbf_s = job_mtbf_s(rate.mean, facts.devices)
    step_s = facts.step.median_s
    kept = before.choices if before else ()
    earlier = {one.tier: one.every_steps for one in kept}
    was_cheap = {one.tier: one.every_steps for one in kept if one.reason == "cheap"}
    shares = survival(facts.tiers)
    targets = _targets(facts, mtbf_s, shares)
    reaches = _reaches(facts)
    fits: dict[Name, _Fit] = {}
    base = 1
    for target, reach in zip(targets, reaches, strict=True):
        name = target.tier.name
        if _is_cheap(target.tier, reach, facts, was_cheap.get(name, 0)):
            fits[name] = _Fit(reach.low, "cheap")
        elif target.reason != "covered":
            fits[name] = _fit(target, reach, base, step_s, earlier.get(name, 0))
        base = fits[name].steps if name in fits else base
    # A tier that does not pay alone takes the interval of the next deeper tier, within its bounds.
    for target, reach in reversed(list(zip(targets, reaches, strict=True))):
        along = _Fit(reach.nearest(base), "covered")
        base = fits.setdefault(target.tier.name, along).steps
    choices = tuple(
        _choice(target, fits[target.tier.name], shares[target.tier.name]) for target in targets
    )
    return Schedule(choices=choices, rate=rate, mtbf_s=mtbf_s, step_s=step_s)


class _Fit(NamedTuple):
    steps: int
    reason: Reason


class _Target(NamedTuple):
    """Interval of a tier before it is rounded to steps and bounded."""

    tier: SaveTier
    reason: Reason
    wanted_s: float = math.inf
    mtbf_s: float = math.inf

    def lost(self, interval_s: float) -> float:
        """Return the exact share of time lost to this tier's saves and the failures that it covers,
        without the restore time, which does not depend on the interval."""
        return 1 - efficiency(interval_s, self.tier.costs.cost_s, self.mtbf_s)


class _Reach(NamedTuple):
    """Range of step counts that bounds and flushes allow."""

    low: int
    high: int

    def nearest(self, steps: int) -> int:
        return min(max(steps, self.low), self.high)


def _targets(facts: ScheduleInputs, mtbf_s: float, shares: dict[Name, float]) -> list[_Target]:
    """Return the optimal intervals of measured tiers, and a first guess for the others."""
    levels = [
        Level(
            tier.name,
            cost_s=tier.costs.cost_s,
            survives=shares[tier.name],
            flush_s=tier.costs.flush.median_s,
            restore_s=tier.costs.restore.median_s,
        )
        for tier in facts.tiers
        if tier.costs.measured
    ]
    chosen = {one.level.name: one for one in pattern(levels, mtbf_s).chosen} if levels else {}

    def of(tier: SaveTier) -> _Target:
        if not tier.costs.measured:
            return _Target(tier, "unmeasured", FIRST_S)
        if tier.name not in chosen:
            return _Target(tier, "covered")
        one = chosen[tier.name]
        flushing = 0 < one.interval_s <= one.level.flush_s
        return _Target(tier, "flush" if flushing else "optimum", one.interval_s, one.mtbf_s)

    return [of(tier) for tier in facts.tiers]


def _reaches(facts: ScheduleInputs) -> list[_Reach]:
    """Return each tier's bounds in steps. A shallower tier's maximum is at most that of a deeper
    tier; a flush that takes longer than the maximum raises it."""
    step_s, high = facts.step.median_s, STEPS_MAX
    found: list[_Reach] = []
    for tier in reversed(facts.tiers):
        bounds = tier.bounds
        high = min(high, bounds.max_steps, max(1, math.floor(_steps(bounds.max_s, step_s))))
        low = min(high, max(bounds.min_steps, math.ceil(_steps(bounds.min_s, step_s))))
        flush = math.ceil(_steps(tier.costs.flush.median_s, step_s))
        found.append(_Reach(max(low, flush), max(high, flush)))
    return found[::-1]


def _is_cheap(tier: SaveTier, reach: _Reach, facts: ScheduleInputs, was_cheap: int) -> bool:
    """Return whether saving as often as possible costs at most `cheap_share` of training.
    `was_cheap`: the earlier interval for that reason, which may cost STAY_CHEAP times that."""
    afford_s = facts.cheap_share * reach.low * facts.step.median_s
    if was_cheap == reach.low:
        afford_s *= STAY_CHEAP
    return tier.name == "memory" and tier.costs.measured and tier.costs.cost_s <= afford_s


def _fit(target: _Target, reach: _Reach, base: int, step_s: float, earlier: int) -> _Fit:
    """Return the best step count within reach; a multiple of `base` if there is one."""
    wanted = _steps(target.wanted_s, step_s)
    below = max(base, math.floor(wanted) // base * base)
    around = (below, below + base)
    edges = (-(-reach.low // base) * base, reach.high // base * base)

    def lost(steps: int) -> float:
        return target.lost(steps * step_s)

    best = min(
        [steps for steps in (*around, *edges) if reach.low <= steps <= reach.high]
        or [reach.nearest(round(wanted))],
        key=lambda steps: (lost(steps), abs(steps - wanted)),
    )
    if target.reason == "unmeasured":
        return _Fit(best, target.reason)
    inside = reach.low <= earlier <= reach.high and earlier % base == 0 and earlier != best
    if inside and lost(earlier) - lost(best) <= min(POINT, STAY_SHARE * lost(best)):
        return _Fit(earlier, "kept")
    return _Fit(best, target.reason if best in around else "bounds")


def _choice(target: _Target, fit: _Fit, survives: float) -> IntervalChoice:
    ends = 0 < target.wanted_s < NEVER_S and target.reason != "unmeasured"
    optimum_s = min(target.wanted_s, NEVER_S)
    flat = flat_zone(target.lost, target.wanted_s) if ends else (optimum_s, optimum_s)
    return IntervalChoice(
        tier=target.tier.name,
        every_steps=fit.steps,
        reason=fit.reason,
        optimum_s=optimum_s,
        flat_s=(flat[0], min(flat[1], NEVER_S)),
        mtbf_s=min(target.mtbf_s, NEVER_S),
        survives=survives,
    )


def _steps(seconds: float, step_s: float) -> float:
    return min(seconds / step_s, STEPS_MAX)


UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))
FORMULA = (
    "tau* = M [1 + W0(-e^(-1 - C/M))], exact (Bougeret et al. 2011); M of each tier's own failures,"
    " tau* not below a flush (Benoit et al. 2017)"
)


def explain(schedule: Schedule, facts: ScheduleInputs) -> str:
    """Return a readable explanation: failure rate, tiers, total cost and formula. `facts` are those
    that `schedule` was decided from."""
    pairs = list(zip(schedule.choices, facts.tiers, strict=True))
    lines = [_failures(schedule, facts)]
    for choice, tier in pairs:
        lines += _tier(choice, tier, facts, schedule)
    lines.append(_bill(pairs, schedule))
    remaining = 1 - schedule.choices[-1].survives
    if remaining > 1e-9:
        lines.append(
            f"warning: no tier survives {_percent(remaining)} of failures; the run then starts from"
            " nothing"
        )
    lines.append(f"formula: {FORMULA}")
    return "\n".join(lines)


def span(seconds: float) -> str:
    """Return seconds as text in the largest unit that they fill, three digits."""
    if seconds >= NEVER_S:
        return "never"
    if seconds == 0:
        return "0 s"
    size, unit = next((one for one in UNITS if seconds >= one[0]), UNITS[-1])
    filled = seconds / size
    return f"{filled:.3g} {unit}" if filled < 1000 else f"{filled:,.0f} {unit}"


def _failures(schedule: Schedule, facts: ScheduleInputs) -> str:
    rate, prior = schedule.rate, facts.prior
    low_s, high_s = 1 / (rate.high * facts.devices), 1 / (rate.low * facts.devices)
    return (
        f"failures: one every {span(schedule.mtbf_s)} on {facts.devices:,} devices (90 %:"
        f" {span(low_s)} to {span(high_s)}): {facts.failures:,} seen in"
        f" {facts.exposure_device_s / 3600:,.0f} device-hours, and {prior.name}, which weighs as"
        f" {rate.prior_failures:.2g} ({prior.source})"
    )


def _tier(
    choice: IntervalChoice, tier: SaveTier, facts: ScheduleInputs, schedule: Schedule
) -> list[str]:
    steps = "every step" if choice.every_steps == 1 else f"every {choice.every_steps:,} steps"
    every_s = choice.every_steps * schedule.step_s
    lines = [f"{choice.tier}: {steps} ({span(every_s)}): {_reason(choice, tier, facts)}"]
    costs = tier.costs
    if costs.measured:
        lines.append(
            f"  C = {span(costs.cost_s)} a save (blocks {span(costs.blocking.median_s)}, slows"
            f" {span(costs.drag.median_s)}), F = {span(costs.flush.median_s)} to flush, R ="
            f" {span(costs.restore.median_s) if costs.restore.values else 'not measured'} to"
            f" restore; M = {span(choice.mtbf_s)} between failures restored from it; saves of it or"
            f" above survive {_percent(choice.survives)} of all"
            f" ({tier.restored:,} seen, {_percent(tier.assumed)} assumed)"
        )
    if choice.reason not in {"unmeasured", "covered"}:
        low_s, high_s = choice.flat_s
        flat = f"; within one point of waste from {span(low_s)} to {span(high_s)}"
        lines.append(f"  tau* = {span(choice.optimum_s)}{flat if low_s < high_s else ''}")
    if costs.measured and costs.cost_s > schedule.mtbf_s:
        lines.append("  warning: a save takes longer than the job runs between failures")
    return lines


def _reason(choice: IntervalChoice, tier: SaveTier, facts: ScheduleInputs) -> str:
    return {
        "optimum": "the optimum, rounded to steps and to the tier above",
        "bounds": f"the nearest to the optimum that {_bound(choice, tier, facts)} allows",
        "flush": "the next save waits until the last one is whole",
        "cheap": f"as often as possible, for at most {_percent(facts.cheap_share)} of training",
        "kept": "as before; the optimum would gain little",
        "covered": "with the next deeper tier; more often does not pay",
        "unmeasured": f"no save has been timed yet; the first one after about {span(FIRST_S)}",
    }[choice.reason]


def _bound(choice: IntervalChoice, tier: SaveTier, facts: ScheduleInputs) -> str:
    """Return the bound that keeps a tier from its optimum."""
    bounds, best_s = tier.bounds, choice.optimum_s
    best = best_s / facts.step.median_s
    if best_s > bounds.max_s:
        return f"max_s = {bounds.max_s:g}"
    if best > bounds.max_steps:
        return f"max_steps = {bounds.max_steps:,}"
    if best_s < bounds.min_s:
        return f"min_s = {bounds.min_s:g}"
    if best < bounds.min_steps:
        return f"min_steps = {bounds.min_steps:,}"
    return "another tier's interval"


def _bill(pairs: list[tuple[IntervalChoice, SaveTier]], schedule: Schedule) -> str:
    saving = redone = restoring = 0.0
    for choice, tier in pairs:
        every_s = choice.every_steps * schedule.step_s
        saving += tier.costs.cost_s / every_s
        redone += (every_s / 2 + tier.costs.flush.median_s) / choice.mtbf_s
        restoring += tier.costs.restore.median_s / choice.mtbf_s
    total = saving + redone + restoring
    rough = "; first order is rough here" if redone + restoring > REGIME_MAX else ""
    return (
        f"cost: {_percent(total)} of training, first order: {_percent(saving)} saving,"
        f" {_percent(redone)} redone work, {_percent(restoring)} restoring{rough}"
    )


def _percent(part: float) -> str:
    return f"{100 * part:.3g} %"
