"""Predictions of theory for each strategy on a scenario.

| strategy | after a failure | needs |
|---|---|---|
| checkpoint-restart | the whole job begins again from storage | |
| peer-memory | it begins again from versions in its nodes' memory | copies |
| migrate | a spare takes over from a live replica, the others pause | replicas, spares |
| drop | the others go on without the replica until it is repaired | replicas |
| outlast | migrate; without a live replica, memory; without that, storage | all of them |
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from outlast.controller.save_schedule.save_intervals import span
from outlast.errors import UsageError
from outlast.plan.model import formula_domain
from outlast.plan.model.answer_values import How
from outlast.plan.model.ladder_costs import (
    Strategy,
    fatal_rate_per_s,
    kinds_of,
    mtbf_s,
    node_rate_per_s,
    pace_of,
    rungs,
    spares_of,
    stays_share,
    taking_rate_per_s,
)
from outlast.plan.model.scenario import NEVER_S, Scenario
from outlast.theory import costs, intervals, replicas, spares, strategies
from outlast.theory.strategies import RecoveryOutcome

EXPONENT_MAX = 500.0  # of e: larger results count as infinite
GOODPUT_MIN = 1e-4  # below, a month of work takes centuries: such a run is called endless


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction of a strategy by its closed forms, or by runs.

    The closed forms are exact where they hold for this scenario. `warnings`: effects left out.
    Infinity where the run does not end in any reasonable time.
    """

    strategy: Strategy
    interval_s: float
    memory_interval_s: float | None
    spares: int
    outcome: RecoveryOutcome
    wall_s: float
    usd: float
    how: How
    warnings: list[str]


def predict(scenario: Scenario, strategy: Strategy) -> Prediction:
    """Predict goodput and other shares of time, in the long run.

    The interval is the best one where the scenario leaves it open. Raises UsageError naming the
    invalid field.
    """
    job, outcome = _tuned(scenario, strategy)
    missing = formula_domain.domain_gaps(scenario, strategy, job, outcome)
    holds = outcome.in_regime and formula_domain.is_first_order(missing)
    outcome = replace(outcome, exact=not missing, in_regime=not missing or holds)
    wall_s = math.inf
    if outcome.goodput >= GOODPUT_MIN:
        wall_s = costs.wall_s(scenario.work_s, outcome.goodput)
    stand_by = spares_of(scenario, strategy)
    memory_s = job.interval_s / job.snapshots if job.snapshots else None
    shortest_s = memory_s or job.interval_s
    warnings = _warnings(scenario, outcome, missing, shortest_s)
    return Prediction(
        strategy=strategy,
        interval_s=job.interval_s,
        memory_interval_s=memory_s,
        spares=stand_by,
        outcome=outcome,
        wall_s=wall_s,
        usd=cost_usd(scenario, wall_s, stand_by),
        how="exact" if outcome.exact else "first order",
        warnings=warnings,
    )


def cost_usd(scenario: Scenario, wall_s: float, stand_by: int) -> float:
    """Return the cost of a run of this duration, its spare nodes included."""
    return costs.cost_usd(
        scenario.gpus,
        wall_s,
        scenario.usd_per_gpu_hour,
        spare_gpus=stand_by * scenario.gpus_per_node,
    )


def at_other_rate(
    scenario: Scenario, strategy: Strategy, job: strategies.RecoveryJob
) -> RecoveryOutcome:
    """Predict `job`, with its intervals and spares fixed, at this scenario's failure rate."""
    job = replace(job, mtbf_s=mtbf_s(scenario))
    return _recovering(scenario, strategy, job)(job)


def how_at_other_rate(scenario: Scenario, strategy: Strategy, job: strategies.RecoveryJob) -> How:
    """Return how `at_other_rate` is known."""
    outcome = at_other_rate(scenario, strategy, job)
    return (
        "first order" if formula_domain.domain_gaps(scenario, strategy, job, outcome) else "exact"
    )


def reason_impossible(scenario: Scenario, strategy: Strategy) -> str:
    """Return why this strategy is impossible in this scenario; "" where it is possible."""
    if strategy in ("migrate", "drop") and scenario.replicas < 2:
        return "needs at least two replicas: set a smaller --replica-gpus"
    if strategy == "peer-memory" and scenario.copies < 2:
        return "needs at least two nodes that hold each part: set --copies higher"
    return ""


def tuned_job(scenario: Scenario, strategy: Strategy) -> strategies.RecoveryJob:
    """Return the job with its intervals, the best where they are open."""
    return _tuned(scenario, strategy)[0]


def _tuned(
    scenario: Scenario, strategy: Strategy
) -> tuple[strategies.RecoveryJob, RecoveryOutcome]:
    if reason := reason_impossible(scenario, strategy):
        raise UsageError(f"{strategy} {reason}")
    if scenario.flush_s > scenario.work_s:
        raise UsageError("--flush is longer than --work: no save would complete before the end")
    if strategy == "peer-memory":
        return _with_intervals(scenario, strategy, in_memory=True)
    plain = _with_intervals(scenario, strategy, in_memory=False)
    if strategy != "outlast":
        return plain
    with_copies = _with_intervals(scenario, strategy, in_memory=True)
    given = scenario.memory_interval_s is not None
    return with_copies if given or with_copies[1].goodput > plain[1].goodput else plain


def _with_intervals(
    scenario: Scenario, strategy: Strategy, *, in_memory: bool
) -> tuple[strategies.RecoveryJob, RecoveryOutcome]:
    job = strategies.RecoveryJob(
        mtbf_s=mtbf_s(scenario),
        interval_s=scenario.interval_s or max(1.0, scenario.flush_s),
        cost_s=scenario.cost_s,
        flush_s=scenario.flush_s,
        drag=scenario.drag,
        snapshots=int(in_memory),
        snapshot_cost_s=scenario.memory_cost_s if in_memory else 0.0,
        detect_s=scenario.detect_s,
        spares=None if strategy == "drop" else spares_of(scenario, strategy),
        repair_s=scenario.repair_s,
    )
    outcome = _recovering(scenario, strategy, job)
    memory_s = scenario.memory_interval_s if in_memory else None

    def settled(job: strategies.RecoveryJob) -> strategies.RecoveryJob:
        """Return the interval: as given, or limited to at least a step and at most the run."""
        open_s = min(max(job.interval_s, scenario.step_s), scenario.work_s)
        job = replace(job, interval_s=scenario.interval_s or open_s)
        count = job.snapshots and min(job.snapshots, max(1, int(job.interval_s / scenario.step_s)))
        if memory_s is not None:
            count = min(strategies.SNAPSHOTS_MAX, max(1, round(job.interval_s / memory_s)))
        return replace(job, snapshots=count)

    if scenario.interval_s is None and memory_s is not None:
        job = _with_versions(lambda job: outcome(settled(job)), job, memory_s, scenario)
    elif memory_s is None and (scenario.interval_s is None or in_memory):
        job = strategies.tune_interval(
            lambda job: outcome(settled(job)),
            job,
            interval_s=scenario.interval_s,
            longest_s=scenario.work_s,
        )
    job = settled(job)
    return job, outcome(job)


def _with_versions(
    outcome: Callable[[strategies.RecoveryJob], RecoveryOutcome],
    job: strategies.RecoveryJob,
    memory_s: float,
    scenario: Scenario,
) -> strategies.RecoveryJob:
    """Return the job with the best whole number of versions, about `memory_s` apart."""
    least = math.ceil(max(scenario.flush_s, scenario.step_s) / memory_s)
    most = min(strategies.SNAPSHOTS_MAX, int(scenario.work_s / memory_s))

    def of(count: int) -> strategies.RecoveryJob:
        return replace(job, interval_s=count * memory_s)

    def enough(count: int) -> bool:
        return outcome(of(count + 1)).goodput <= outcome(of(count)).goodput

    between = range(max(1, least), max(1, least, most))
    return of(between.start + bisect.bisect_left(between, True, key=enough))


def _recovering(
    scenario: Scenario, strategy: Strategy, job: strategies.RecoveryJob
) -> Callable[[strategies.RecoveryJob], RecoveryOutcome]:
    """Return the outcome of `job` at another job's intervals, with the strategy's own overhead."""
    outcome = _at_full_speed(scenario, strategy, job)
    pace = pace_of(scenario, strategy)
    if pace == 1:
        return outcome
    return lambda job: _slower(outcome(replace(job, interval_s=job.interval_s * pace)), pace)


def _slower(of: RecoveryOutcome, pace: float) -> RecoveryOutcome:
    """Return the same prediction where a second of work takes `pace`."""
    useful = of.goodput / pace
    return replace(of, goodput=useful, degraded=of.degraded + of.goodput - useful)


def _at_full_speed(
    scenario: Scenario, strategy: Strategy, job: strategies.RecoveryJob
) -> Callable[[strategies.RecoveryJob], RecoveryOutcome]:
    if strategy == "drop":
        return _dropping(scenario, job)
    ladder = rungs(scenario, strategy, memory=job.snapshots > 0)
    if job.spares is None or scenario.rack_mtbf_s == NEVER_S:
        return strategies.recovering(job, ladder)
    away = spares.StalledShares(kinds_of(scenario), scenario.repair_s, job.spares)
    stalled = away.share(job.spares)
    unstalled = strategies.recovering(replace(job, spares=None), ladder)
    return lambda job: _stalled(unstalled(job), stalled)


def _stalled(of: RecoveryOutcome, share: float) -> RecoveryOutcome:
    """Return the same prediction with this share of time spent waiting for nodes.

    Nothing fails while the job waits.
    """
    running = 1 - share
    return replace(
        of,
        goodput=running * of.goodput,
        save=running * of.save,
        redo=running * of.redo,
        detect=running * of.detect,
        recover=running * of.recover,
        wait=share + running * of.wait,
        recover_by_rung={name: running * part for name, part in of.recover_by_rung.items()},
        failures_per_s=running * of.failures_per_s,
    )


def _dropping(
    scenario: Scenario, job: strategies.RecoveryJob
) -> Callable[[strategies.RecoveryJob], RecoveryOutcome]:
    """Return the outcome of dropping replicas, first order.

    Other failures among a replica's nodes while one is out, and failures during restarts, are
    merged into one repair and one restart time.
    """
    count = scenario.replicas
    every = 1 / job.mtbf_s
    taking = 1 - stays_share(scenario)
    # Other nodes of a replica that is out fail as well: a busy period of the M/G/infinity queue.
    taken_rate = node_rate_per_s(scenario) * scenario.nodes / count * taking
    load = min(EXPONENT_MAX, taken_rate * scenario.repair_s)
    out_s = scenario.repair_s * (math.expm1(load) / load if load else 1.0)
    out_s *= _unspared_share(scenario)
    lost = replicas.loss_rate_per_s(count, count, every / count, out_s)
    fatal = min(every, lost + fatal_rate_per_s(scenario))
    restart_s = _under_all_s(job.detect_s + scenario.restart_s, every, fatal) - job.detect_s
    pause_s = scenario.pause_s + scenario.step_s / 2

    def outcome(variant: strategies.RecoveryJob) -> RecoveryOutcome:
        dropped = replicas.drop_and_regrow(
            replace(variant, repair_s=out_s * taking), count, pause_s, restart_s, fatal / every
        )
        paused = intervals.in_regime(job.detect_s + pause_s, job.mtbf_s)
        holds = dropped.in_regime and paused and load <= intervals.REGIME_MAX
        return replace(dropped, exact=False, in_regime=holds)

    return outcome


def _unspared_share(scenario: Scenario) -> float:
    """Return the share of repair time in which no spare stands in (Little 1961)."""
    count = spares_of(scenario, "drop")
    mean = spares.in_repair(taking_rate_per_s(scenario), scenario.repair_s)
    return spares.shortage(count, mean) / mean if count and mean else 1.0


def _under_all_s(length_s: float, every: float, fatal: float) -> float:
    """Return the recovery time that, restarted by fatal failures only, equals this one.

    This one is restarted by every failure; equal in the mean.
    """
    if not fatal:
        return length_s
    takes_s = math.expm1(min(every * length_s, EXPONENT_MAX)) / every
    return math.log1p(fatal * takes_s) / fatal


def _warnings(
    scenario: Scenario,
    outcome: RecoveryOutcome,
    missing: Sequence[formula_domain.DomainGap],
    shortest_s: float,
) -> list[str]:
    """Return the effects that the closed form leaves out, with their size where known."""
    simulated = "`outlast plan compare` simulates it"
    notes = [
        f"{gap.text}{'' if gap.share is None else f' (some {gap.share:.2%} of the time)'};"
        f" {simulated}"
        for gap in missing
        if gap.text != formula_domain.FIRST_ORDER
    ]
    if not outcome.in_regime:
        notes.append(f"first order, outside its regime; {simulated}")
    if shortest_s < scenario.step_s:
        notes.append(
            f"saves come every {span(shortest_s)}, within steps: a step of"
            f" {span(scenario.step_s)} would have to be shorter"
        )
    return notes
