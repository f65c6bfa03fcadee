"""Costs besides failures: silent errors, stragglers, planned stops, preemption, storage.

Each is a factor of the advised price; their interplay with failures is first order.
"""

from __future__ import annotations

import math

import msgspec

from outlast.errors import UsageError
from outlast.plan.model.answer_values import How, format_quantity
from outlast.plan.model.ladder_costs import mtbf_s, rungs
from outlast.plan.model.scenario import Scenario
from outlast.plan.model.strategy_prediction import Prediction
from outlast.theory import costs, intervals, levels


class ExtraInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of extra costs in seconds, shares and dollars; None: not requested.

    `silent_mtbf_s`, `preempted_every_s`: of the whole job. `straggler_share`: of GPUs that are slow
    in a step, `straggler_factor` times as long. `local_survives`: share of failures that a save on
    local drives survives.
    """

    silent_mtbf_s: float | None = None
    verify_s: float = 0.0
    straggler_share: float | None = None
    straggler_factor: float = 2.0
    maintenance_every_s: float | None = None
    maintenance_s: float = 3600.0
    preempted_every_s: float | None = None
    notice_s: float = 0.0
    queue_s: float = 0.0
    usd_per_spot_hour: float | None = None
    usd_per_gb_month: float | None = None
    kept: int = 3
    usd_per_gb_moved: float = 0.0
    local_cost_s: float | None = None
    local_restore_s: float = 60.0
    local_survives: float = 0.5


class ExtraCost(msgspec.Struct, frozen=True, kw_only=True):
    """One cost besides failures. `usd`: over the advised price; negative for a saving."""

    what: str
    usd: float
    text: str = msgspec.field(name="said")
    how: How = "first order"


def extra_costs(scenario: Scenario, taken: Prediction, inputs: ExtraInputs) -> list[ExtraCost]:
    """Return the requested costs for the advised strategy; empty if no run ends.

    Raises UsageError naming the invalid input.
    """
    if math.isinf(taken.usd):
        return []
    extras: list[ExtraCost] = []
    if inputs.silent_mtbf_s is not None:
        extras.append(_silent(scenario, taken, inputs.silent_mtbf_s, inputs.verify_s))
    if inputs.straggler_share is not None:
        extras.append(_stragglers(scenario, taken, inputs.straggler_share, inputs.straggler_factor))
    if inputs.maintenance_every_s is not None:
        extras.append(
            _maintenance(scenario, taken, inputs.maintenance_every_s, inputs.maintenance_s)
        )
    if inputs.preempted_every_s is not None:
        extras.append(_preemption(scenario, taken, inputs, inputs.preempted_every_s))
    elif inputs.usd_per_spot_hour is not None:
        raise UsageError("--spot-hour needs --preempted-every, the time between preemptions")
    if inputs.usd_per_gb_month is not None:
        extras.append(_storage(scenario, taken, inputs, inputs.usd_per_gb_month))
    if inputs.local_cost_s is not None:
        extras.append(_levels(scenario, taken, inputs, inputs.local_cost_s))
    return extras


def _silent(scenario: Scenario, taken: Prediction, every_s: float, verify_s: float) -> ExtraCost:
    """Return the cost of silent errors.

    Only failures that restart from storage interact with it: recoveries from live ranks and memory
    cost the same with silent errors.
    """
    falls = taken.outcome.falls_back
    fails_s = mtbf_s(scenario) / falls if falls else math.inf
    how = {"mtbf_s": fails_s, "restart_s": scenario.detect_s + scenario.restart_s}
    best_s = float(costs.best_verified_interval(verify_s, scenario.cost_s, every_s, **how))
    best_s = min(max(best_s, scenario.step_s, scenario.flush_s), scenario.work_s)
    verified = costs.verified_segment_s(best_s, verify_s, scenario.cost_s, every_s, **how) / best_s
    plain_s = costs.verified_segment_s(taken.interval_s, 0.0, scenario.cost_s, math.inf, **how)
    usd = taken.usd * max(0.0, float(verified / (plain_s / taken.interval_s) - 1))
    return ExtraCost(
        what="silent errors",
        usd=usd,
        text=f"One every {format_quantity(every_s, 's')}, without any report: verify"
        f" ({format_quantity(verify_s, 's')}) before each durable save, after"
        f" {format_quantity(best_s, 's')} of work;"
        " an unverified save may contain the error.",
    )


def _stragglers(scenario: Scenario, taken: Prediction, share: float, factor: float) -> ExtraCost:
    slower = float(costs.step_slowdown(share, scenario.gpus, factor))
    some = float(costs.any_slow(share, scenario.gpus))
    return ExtraCost(
        what="stragglers",
        usd=taken.usd * (slower - 1),
        text=f"{format_quantity(some, 'share')} of steps have a slow GPU among"
        f" {scenario.gpus:,}, and all"
        f" wait for it: steps are {format_quantity(slower - 1, 'share')} longer.",
    )


def _maintenance(
    scenario: Scenario, taken: Prediction, every_s: float, length_s: float
) -> ExtraCost:
    share = costs.maintenance_share(
        every_s,
        length_s,
        save_s=scenario.cost_s + scenario.flush_s,
        restart_s=scenario.restart_s,
        mtbf_s=mtbf_s(scenario),
    )
    return ExtraCost(
        what="planned stops",
        usd=taken.usd * share / (1 - share) if share < 1 else math.inf,
        text=f"Every {format_quantity(every_s, 's')} for {format_quantity(length_s, 's')}, with"
        " a save before and a"
        f" start after: {format_quantity(share, 'share')} of the time.",
    )


def _preemption(
    scenario: Scenario, taken: Prediction, inputs: ExtraInputs, every_s: float
) -> ExtraCost:
    save_s = scenario.cost_s + scenario.flush_s
    if inputs.notice_s >= save_s:
        cost_s = costs.preemption_s(
            inputs.notice_s,
            save_s,
            taken.interval_s,
            restart_s=scenario.restart_s,
            queue_s=inputs.queue_s,
        )
        advice = f"is enough for a save of {format_quantity(save_s, 's')}."
    else:
        interval_s, cost_s = _preemption_without_notice(scenario, taken, inputs, every_s)
        advice = (
            f"is too short for a save of {format_quantity(save_s, 's')}, so that a durable save"
            f" after {format_quantity(interval_s, 's')} of work is best."
        )
    longer = 1 + cost_s / every_s
    text = (
        f"One every {format_quantity(every_s, 's')} costs {format_quantity(cost_s, 's')}; a"
        f" notice of {format_quantity(inputs.notice_s, 's')} {advice}"
    )
    if inputs.usd_per_spot_hour is None:
        return ExtraCost(what="preemption", usd=taken.usd * (longer - 1), text=text)
    spot_usd = taken.usd * inputs.usd_per_spot_hour / scenario.usd_per_gpu_hour * longer
    cheaper = "cheaper" if spot_usd < taken.usd else "more expensive"
    even = scenario.usd_per_gpu_hour / longer
    text += (
        f" At the spot price the run costs {format_quantity(spot_usd, 'USD')}, {cheaper} than"
        " reserved GPUs;"
        f" spot is cheaper below {format_quantity(even, 'USD')} a GPU-hour."
    )
    return ExtraCost(what="spot prices", usd=spot_usd - taken.usd, text=text)


def _preemption_without_notice(
    scenario: Scenario, taken: Prediction, inputs: ExtraInputs, every_s: float
) -> tuple[float, float]:
    """Return the best interval of durable saves, and the cost of one preemption in seconds.

    A preemption restarts from the last save, as do those failures that fall back to storage:
    exact for the two as one Poisson process, with the mean of their restarts. Recoveries from live
    ranks and memory cost the same with preemptions.
    """
    saves = {"flush_s": scenario.flush_s, "drag": scenario.drag}
    fails = taken.outcome.falls_back / mtbf_s(scenario)
    rate = fails + 1 / every_s
    best_s = intervals.optimum_async(
        scenario.cost_s, scenario.flush_s, 1 / rate, drag=scenario.drag
    )
    best_s = min(max(float(best_s), scenario.step_s), scenario.work_s)
    lasting = intervals.efficiency(
        best_s,
        scenario.cost_s,
        1 / rate,
        restart_s=scenario.restart_s + scenario.detect_s * fails / rate,
        down_s=inputs.queue_s / (every_s * rate),
        **saves,
    )
    undisturbed = intervals.efficiency(
        taken.interval_s,
        scenario.cost_s,
        1 / fails if fails else math.inf,
        restart_s=scenario.restart_s + scenario.detect_s,
        **saves,
    )
    longer = float(undisturbed / lasting) if lasting else math.inf
    return best_s, every_s * max(0.0, longer - 1)


def _storage(
    scenario: Scenario, taken: Prediction, inputs: ExtraInputs, usd_per_gb_month: float
) -> ExtraCost:
    stored = scenario.state_bytes * inputs.kept
    saves = taken.wall_s / taken.interval_s
    moved = saves * scenario.state_bytes
    whole = costs.cost_usd(
        1,
        taken.wall_s,
        0.0,
        stored_bytes=stored,
        usd_per_gb_month=usd_per_gb_month,
        moved_bytes=moved,
        usd_per_gb_moved=inputs.usd_per_gb_moved,
    )
    return ExtraCost(
        what="storage",
        usd=whole,
        text=f"{inputs.kept} checkpoints of {format_quantity(scenario.state_bytes, 'bytes')} are"
        " kept; some"
        f" {format_quantity(saves, '')} saves move {format_quantity(moved, 'bytes')}.",
    )


def _levels(
    scenario: Scenario, taken: Prediction, inputs: ExtraInputs, local_cost_s: float
) -> ExtraCost:
    """Return the pattern of saves with local drives between memory and storage."""
    every_s = mtbf_s(scenario)
    ladder = rungs(
        scenario,
        "peer-memory" if scenario.copies > 1 else "checkpoint-restart",
        memory=scenario.copies > 1,
    )
    in_memory = math.fsum(rung.share for rung in ladder if rung.loses == "snapshot")
    memory = levels.Level(
        name="memory",
        cost_s=scenario.memory_cost_s,
        flush_s=0.0,
        restore_s=scenario.restore_s,
        survives=in_memory,
    )
    local = levels.Level(
        name="local drives",
        cost_s=local_cost_s,
        flush_s=0.0,
        restore_s=inputs.local_restore_s,
        survives=max(in_memory, inputs.local_survives),
    )
    storage = levels.Level(
        name="storage",
        cost_s=scenario.cost_s,
        flush_s=scenario.flush_s,
        restore_s=scenario.restart_s,
        survives=1.0,
        drag=scenario.drag,
    )
    above = [memory] if in_memory else []
    without = levels.pattern([*above, storage], every_s, down_s=scenario.detect_s)
    pattern = levels.pattern([*above, local, storage], every_s, down_s=scenario.detect_s)
    chosen = ", ".join(
        f"{row.level.name} every {format_quantity(row.interval_s, 's')}" for row in pattern.chosen
    )
    saves = min(0.0, pattern.waste - without.waste)
    return ExtraCost(
        what="levels of saves",
        usd=taken.usd * saves,
        text=f"When the whole job restarts, the best pattern is {chosen}: it takes"
        f" {format_quantity(pattern.waste, 'share')} of"
        f" the time, {format_quantity(without.waste, 'share')} without local drives.",
    )
