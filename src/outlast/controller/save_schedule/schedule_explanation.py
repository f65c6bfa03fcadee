"""Explanation of a save schedule: numbers, formulas, sources, and the bounds that apply."""

from __future__ import annotations

from outlast.controller.save_schedule.save_intervals import (
    FIRST_S,
    NEVER_S,
    IntervalChoice,
    Schedule,
)
from outlast.controller.save_schedule.save_tiers import SaveTier, ScheduleInputs
from outlast.theory.intervals import REGIME_MAX

UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))
FORMULA = (
    "tau* = M [1 + W0(-e^(-1 - C/M))], exact (Bougeret et al. 2011); M of each tier's own failures,"
    " tau* not below a flush (Benoit et al. 2017)"
)


def explain(schedule: Schedule, facts: ScheduleInputs) -> str:
    """Lines for people: the failure rate, each tier, what all of it costs, and the formula.
    `facts` are those that `schedule` was decided from."""
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
    """Seconds in the largest unit that they fill, three digits."""
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
        "cheap": f"as often as can be, for at most {_percent(facts.cheap_share)} of training",
        "kept": "as before; the optimum would gain next to nothing",
        "covered": "with the next deeper tier; more often does not pay",
        "unmeasured": f"no save has been timed yet; the first one after about {span(FIRST_S)}",
    }[choice.reason]


def _bound(choice: IntervalChoice, tier: SaveTier, facts: ScheduleInputs) -> str:
    """The bound that keeps a tier from its optimum."""
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
