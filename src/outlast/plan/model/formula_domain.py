"""Domain of each closed form: effects of a scenario that it leaves out, with their size.

`domain_gaps` alone decides whether a prediction may be called exact. Each gap has an estimate of
the share of wall time by which it moves the result; tests/plan/model/test_formula_domain.py draws
scenarios over the whole field space and compares predictions called exact with the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from outlast.plan.model.answer_values import How
from outlast.plan.model.ladder_costs import (
    Strategy,
    fatal_rate_per_s,
    mtbf_s,
    pace_of,
    rungs,
    sources,
)
from outlast.plan.model.scenario import NEVER_S, Scenario
from outlast.theory.strategies import RecoveryJob, RecoveryOutcome, Rung

EXACT_TO = 1e-3  # of wall time: a formula is called exact where all its gaps together are smaller
FIRST_ORDER_TO = 0.05  # of wall time: beyond, a first-order formula is outside its regime
FIRST_ORDER = "the formula is first order"
REPAIRS_MIN = 5.0  # repair times that a run must last for long-run formulas to hold
EXPONENT_MAX = 50.0
LISTED_SHARE_MIN = 0.1  # of the sum of all gaps: smaller ones are not listed


class DomainGap(NamedTuple):
    """Part of a scenario that a formula leaves out.

    `share`: of wall time, an estimate; None where there is none.
    """

    text: str
    share: float | None


def domain_gaps(
    scenario: Scenario, strategy: Strategy, job: RecoveryJob, outcome: RecoveryOutcome
) -> list[DomainGap]:
    """Return the parts of this scenario that a closed form leaves out, largest first.

    Empty where the formula is exact: where they are less than EXACT_TO of wall time.
    """
    gaps = [*_simplified(scenario), *([] if outcome.exact else [DomainGap(FIRST_ORDER, None)])]
    sized = [
        _ends(scenario, job, outcome),
        _first_repairs(scenario, job, outcome),
        _deeper_rungs(scenario, strategy, job),
        _broken_steps(scenario, strategy, job),
    ]
    whole = math.fsum(gap.share or 0.0 for gap in sized)
    if whole > EXACT_TO:
        sized = [gap for gap in sized if (gap.share or 0.0) > LISTED_SHARE_MIN * whole]
        gaps += sorted(sized, key=lambda gap: -(gap.share or 0.0))
    return gaps


def is_first_order(gaps: Sequence[DomainGap]) -> bool:
    """Return whether a formula with these gaps is still right to first order."""
    return math.fsum(gap.share or 0.0 for gap in gaps) <= FIRST_ORDER_TO


def of_rate(scenario: Scenario) -> How:
    """Return how the job's failure rate is known.

    Exact where no node ages and none is a lemon, which leaves the job for its repair.
    """
    poisson = scenario.shape == 1 and not scenario.lemons and scenario.gap_spread is None
    return "exact" if poisson else "first order"


def of_repairs(scenario: Scenario) -> How:
    """Return how the number of nodes in repair is known: exact in a run of many repairs."""
    settled = scenario.work_s >= REPAIRS_MIN * scenario.repair_s
    return of_rate(scenario) if settled else "first order"


def of_losses(scenario: Scenario, window_s: float) -> How:
    """Return how the rate is known at which all copies of a part are lost.

    Each part lacks a copy for `window_s`. Exact where failures rarely overlap in that window.
    """
    alone = math.expm1(min(EXPONENT_MAX, window_s / mtbf_s(scenario))) <= EXACT_TO
    racks = scenario.rack_mtbf_s < NEVER_S
    return of_rate(scenario) if alone and not racks else "first order"


def _simplified(scenario: Scenario) -> list[DomainGap]:
    texts = {
        "lemons are treated as ordinary nodes with the mean rate": scenario.lemons > 0,
        "nodes are assumed not to age": scenario.shape != 1,
        "failures are assumed to be random, not at even gaps": scenario.gap_spread is not None,
        "rack failures are assumed to leave what node failures do": scenario.rack_mtbf_s < NEVER_S,
    }
    return [DomainGap(text, None) for text, here in texts.items() if here]


def _ends(scenario: Scenario, job: RecoveryJob, outcome: RecoveryOutcome) -> DomainGap:
    """Return the gap of a finite run, for a formula of the long run.

    The run ends with a flush and, unless intervals divide its work, with a shorter interval.
    """
    text = "the run is short: its last save and flush matter"
    wall_s = _wall_s(scenario, outcome)
    last_s = (1 - job.drag) * job.flush_s
    rounds = scenario.work_s / job.interval_s
    if abs(rounds - round(rounds)) > 1e-9 * rounds:
        running = 1 - outcome.wait
        lost = 1 - outcome.goodput / running if running else 1.0
        last_s += lost * min(wall_s, job.interval_s / max(outcome.goodput, 1e-9))
    return DomainGap(text, last_s / wall_s)


def _first_repairs(scenario: Scenario, job: RecoveryJob, outcome: RecoveryOutcome) -> DomainGap:
    """Return the gap at the start: a run begins with all spares, not in the steady state."""
    text = "repairs are long compared with the run, which begins with all its spares"
    if not job.spares:  # it waits from its first failure on, as ever after
        return DomainGap(text, 0.0)
    late_s = scenario.repair_s * (1 + math.log(job.spares + 1))
    return DomainGap(text, outcome.wait * min(1.0, late_s / _wall_s(scenario, outcome)))


def _deeper_rungs(scenario: Scenario, strategy: Strategy, job: RecoveryJob) -> DomainGap:
    """Return the gap of dependent failures, whose rungs the formula draws independently.

    Holders of one part are lost in successive failures, the sooner the longer recoveries take.
    """
    text = "failures come so fast that all holders of a part are often lost at once"
    found = sources(scenario, strategy, memory=job.snapshots > 0)
    every = 1 / mtbf_s(scenario)
    window_s = scenario.detect_s + max(takes for _, takes in found) + scenario.window_s
    often = math.expm1(min(EXPONENT_MAX, every * window_s))
    deeper = max(0.0, _deeper_share(scenario, rungs(scenario, strategy, memory=job.snapshots > 0)))
    costs_s = found[-1][1] + job.interval_s + job.flush_s
    if len(found) == 1 or not deeper:
        return DomainGap(text, 0.0)
    return DomainGap(text, every * costs_s * min(1.0, deeper * often))


def _deeper_share(scenario: Scenario, ladder: Sequence[Rung]) -> float:
    """Return the share of failures that lose more than their first source for want of a holder."""
    first = ladder[0].loses
    beyond = math.fsum(rung.share for rung in ladder if rung.loses != first)
    return beyond - fatal_rate_per_s(scenario) * mtbf_s(scenario)


def _broken_steps(scenario: Scenario, strategy: Strategy, job: RecoveryJob) -> DomainGap:
    """Return the gap of interrupted steps: half a step of pause where live replicas go on."""
    text = "a step is long compared with the time between saves or failures"
    rungs = sources(scenario, strategy, memory=job.snapshots > 0)
    if rungs[0][0] != "nothing" or not scenario.step_s:
        return DomainGap(text, 0.0)
    every = 1 / mtbf_s(scenario)
    between_s = job.interval_s / max(1, job.snapshots)
    saving_s = job.cost_s + max(1, job.snapshots) * job.snapshot_cost_s + job.drag * job.flush_s
    again = every * (scenario.detect_s + rungs[0][1])
    odd = (
        pace_of(scenario, strategy)
        - 1
        + min(1.0, scenario.step_s / between_s)
        + saving_s / (job.interval_s + saving_s)
    )
    return DomainGap(text, every * scenario.step_s / 2 * min(1.0, odd + again))


def _wall_s(scenario: Scenario, outcome: RecoveryOutcome) -> float:
    return scenario.work_s / outcome.goodput if outcome.goodput else math.inf
