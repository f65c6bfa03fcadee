"""Answers by formulas: the best save interval, ETTR by every published formula, what reaches it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from outlast.controller.save_schedule.save_intervals import span
from outlast.errors import UsageError
from outlast.plan.model import formula_domain
from outlast.plan.model.answer_values import Answer, How, Quantity, answer, quantity_with_band
from outlast.plan.model.ladder_costs import Strategy, matters, mtbf_s
from outlast.plan.model.scenario import Scenario
from outlast.plan.model.strategy_prediction import (
    Prediction,
    at_other_rate,
    how_at_other_rate,
    predict,
    tuned_job,
)
from outlast.theory import ettr as theory
from outlast.theory import intervals
from outlast.theory.numerics import find_minimum, find_root

KOKOLIS = "Kokolis et al. 2025"
RENEWAL = "renewals, docs/theory.md"


def ettr(scenario: Scenario, target: float | None = None, queue_s: float = 0.0) -> Answer:
    """Return the ETTR of a scenario and, with a `target`, single changes that reach it.

    u0 is detection and restart from storage; `queue_s` the wait after each failure before the
    start. Raises UsageError for an invalid target.
    """
    if target is not None and not 0 < target < 1:
        raise UsageError(f"--target {target:g} must be above 0 and below 1")
    at_s = interval_s(scenario)
    quantities = [
        _between_failures(scenario),
        Quantity(
            name="interval, tau",
            value=at_s,
            unit="s",
            how="given" if scenario.interval_s else predict(scenario, "checkpoint-restart").how,
            source="" if scenario.interval_s else "the best; `outlast plan interval`",
        ),
        Quantity(
            name="start, u0",
            value=init_s(scenario),
            unit="s",
            how="given",
            source="detect + restart",
        ),
        *_by_formula(scenario, at_s, queue_s),
    ]
    warnings = _regime(scenario, at_s) + predict(scenario, "checkpoint-restart").warnings
    if target is not None:
        gives, cannot = _target_settings(scenario, at_s, queue_s, target)
        quantities += gives
        warnings += cannot
    about = matters("checkpoint-restart")
    return answer("Which share of time is training (ETTR)?", scenario, quantities, warnings, about)


def _between_failures(scenario: Scenario) -> Quantity:
    name, source = "between failures of the job", "rates add up"
    return quantity_with_band(name, "s", formula_domain.of_rate, source, scenario, mtbf_s)


def init_s(scenario: Scenario) -> float:
    """Return u0: seconds from a failure until work continues."""
    return scenario.detect_s + scenario.restart_s


def interval_s(scenario: Scenario) -> float:
    """Return the given interval, or the best one."""
    return scenario.interval_s or predict(scenario, "checkpoint-restart").interval_s


def exact(scenario: Scenario, at_s: float, queue_s: float) -> float:
    """Return the long-run ETTR, saves charged, at this scenario's failure rate."""
    return theory.exact(
        at_s, mtbf_s(scenario), init_s=init_s(scenario), queue_s=queue_s, cost_s=scenario.cost_s
    )


def how(scenario: Scenario) -> How:
    """Return how `exact` is known.

    It is exact for a long run with synchronous saves that never lacks a node.
    """
    bare = replace(scenario, flush_s=0.0, drag=0.0, spares=None)
    return predict(bare, "checkpoint-restart").how


def _by_formula(scenario: Scenario, at_s: float, queue_s: float) -> list[Quantity]:
    start_s = init_s(scenario)
    work_s = scenario.work_s
    scenario = replace(scenario, interval_s=at_s)
    job = tuned_job(scenario, "checkpoint-restart")
    share = partial(quantity_with_band, unit="share", scenario=scenario)
    flushed = partial(how_at_other_rate, strategy="checkpoint-restart", job=job)

    def free(scenario: Scenario) -> float:
        return theory.exact(at_s, mtbf_s(scenario), init_s=start_s, queue_s=queue_s)

    def one_and_seven(scenario: Scenario) -> float:
        return theory.equation_1(
            at_s, mtbf_s(scenario), productive_s=work_s, init_s=start_s, queue_s=queue_s
        )

    def two(scenario: Scenario) -> float:
        return theory.equation_2(at_s, mtbf_s(scenario), init_s=start_s)

    def six(scenario: Scenario) -> float:
        return theory.equation_6(
            at_s, mtbf_s(scenario), productive_s=work_s, init_s=start_s, queue_s=queue_s
        )

    def failures(scenario: Scenario) -> float:
        return theory.equation_4(at_s, mtbf_s(scenario), productive_s=work_s, init_s=start_s)

    return [
        share("ETTR", how=how, source=RENEWAL, function=lambda case: exact(case, at_s, queue_s)),
        share(
            "goodput",
            how=flushed,
            source=f"with flushes and waits for nodes{', without --queue' if queue_s else ''}",
            function=lambda case: at_other_rate(case, "checkpoint-restart", job).goodput,
        ),
        share("ETTR with free saves", how=how, source="C = 0", function=free),
        share("equations 1 and 7", how="first order", source=KOKOLIS, function=one_and_seven),
        share("equations 2 and 8", how="first order", source="q = 0, long runs", function=two),
        share("equations 4 to 6", how="first order", source="at least this", function=six),
        quantity_with_band(
            "failures of the run", "times", "first order", "equation 4", scenario, failures
        ),
    ]


def _regime(scenario: Scenario, at_s: float) -> list[str]:
    start_s = init_s(scenario)
    every_s = mtbf_s(scenario)
    if theory.in_regime(at_s, every_s, init_s=start_s):
        return []
    lost = (start_s + at_s / 2) / every_s
    endless = ", and equation 4 counts failures without end" if lost >= 1 else ""
    return [
        f"L (u0 + tau/2) is {lost:.2g}, above 0.3: equations 1 to 8 do not hold here{endless};"
        " ETTR does"
    ]


def _target_settings(
    scenario: Scenario, at_s: float, queue_s: float, target: float
) -> tuple[list[Quantity], list[str]]:
    """Return the changes that reach `target` one at a time, and those that cannot alone."""
    start_s = init_s(scenario)
    cost_s = scenario.cost_s
    source = f"for {target:g}"
    quantities: list[Quantity] = []
    cannot: list[str] = []

    def add(name: str, function: Callable[[Scenario], float], source: str = source) -> None:
        try:
            function(scenario)
        except UsageError as error:
            cannot.append(f"no {name.removesuffix(' at most')} alone gives {target:g}: {error}")
        else:
            known = partial(_or_0, function)
            quantities.append(quantity_with_band(name, "s", how, source, scenario, known))
            if "interval" in name and quantities[-1].value < scenario.flush_s:
                cannot.append(
                    f"{name} {span(quantities[-1].value)}: a flush takes {span(scenario.flush_s)},"
                    " and a save begins when the last one ends"
                )

    def interval(scenario: Scenario) -> float:
        return theory.interval_for(
            target, mtbf_s(scenario), init_s=start_s, queue_s=queue_s, cost_s=cost_s
        )

    def start(scenario: Scenario) -> float:
        return theory.init_for(target, at_s, mtbf_s(scenario), queue_s=queue_s, cost_s=cost_s)

    add("interval at most", interval)
    add("start at most", start)
    add("interval and start at most", partial(_both, target, queue_s), f"{source}, each of them")
    try:
        every_s = theory.mtbf_for(target, at_s, init_s=start_s, queue_s=queue_s, cost_s=cost_s)
    except UsageError as error:
        cannot.append(f"no failure rate alone gives {target:g}: {error}")
    else:
        times = quantity_with_band(
            "failure rate at most",
            "times",
            how,
            "of the present rate",
            scenario,
            lambda case: mtbf_s(case) / every_s,
        )
        least_s = Quantity(
            name="between failures at least",
            value=every_s,
            unit="s",
            how=how(scenario),
            source=source,
        )
        quantities += [least_s, times]
    return quantities, cannot


def _or_0(function: Callable[[Scenario], float], scenario: Scenario) -> float:
    """Return the value, or 0 where the target is out of reach at this rate."""
    try:
        return function(scenario)
    except UsageError:
        return 0.0


def _both(target: float, queue_s: float, scenario: Scenario) -> float:
    """Return the longest time for both interval and start. Raises UsageError."""
    every_s = mtbf_s(scenario)

    def at(both_s: float) -> float:
        return theory.exact(both_s, every_s, init_s=both_s, queue_s=queue_s, cost_s=scenario.cost_s)

    best_s = find_minimum(lambda both_s: -at(both_s), 1e-9 * every_s, every_s)
    if at(best_s) < target:
        raise UsageError(f"the best is {at(best_s):.6g}, {best_s:.4g} s each")
    return find_root(lambda both_s: at(both_s) - target, best_s, 10 * every_s)


BOUGERET = "Bougeret et al. 2011, solved by Lambert's W"
MODEL = "docs/theory.md, the model of a strategy"
CLOSE = 1e-6


def best_interval(scenario: Scenario, strategy: Strategy) -> Answer:
    """Return the best intervals of durable saves and of versions in memory.

    With Young's and Daly's interval, the flat zone, the goodput there and, where the scenario has
    an interval, at that one. Bands keep intervals and spares, because the true rate is unknown.
    """
    tuned = replace(scenario, interval_s=None)
    best = predict(tuned, strategy)

    def hows(scenario: Scenario) -> How:
        return predict(scenario, strategy).how

    quantities = [
        _between_failures(scenario),
        quantity_with_band(
            "best interval",
            "s",
            hows,
            _why(tuned, best),
            tuned,
            lambda case: predict(case, strategy).interval_s,
        ),
        _classic("Young's interval", "Young 1974", tuned, intervals.young),
        _classic("Daly's interval", "Daly 2006, series", tuned, intervals.daly),
        _goodput("goodput at the best", tuned, strategy),
    ]
    warnings = list(best.warnings)
    if best.memory_interval_s is not None:
        quantities.insert(2, _in_memory(tuned, best))
        if quantities[2].high == math.inf:
            warnings.append("at an end of the rate's band no versions in memory are saved")
    if math.isfinite(best.wall_s):
        zone = flat_zone(tuned, best)
        ends = (("flat zone from", zone.low_s), ("flat zone to", zone.high_s))
        quantities[-1:-1] = [
            Quantity(
                name=name, value=value, unit="s", how=best.how, source="within one point of goodput"
            )
            for name, value in ends
        ]
    else:
        every = span(mtbf_s(scenario))
        warnings.append(f"no interval ends this run: failures come every {every}")
    if scenario.interval_s is not None:
        here = predict(scenario, strategy)
        quantities.append(_goodput("goodput at the given interval", scenario, strategy))
        warnings += [warning for warning in here.warnings if warning not in warnings]
    return answer(
        f"How often should {strategy} save?",
        scenario,
        quantities,
        warnings,
        matters(strategy) - {"work"},
    )


def flat_zone(scenario: Scenario, best: Prediction) -> intervals.Zone:
    """Return the intervals whose goodput is within one point of the best.

    They are no shorter than a flush and a step, and no longer than the run. `best`: the prediction
    for `scenario`, which leaves the interval open.
    """
    zone = intervals.flat_zone(partial(waste, scenario, best.strategy), best.interval_s)
    shortest_s = min(scenario.work_s, max(scenario.flush_s, scenario.step_s))
    return intervals.Zone(max(zone.low_s, shortest_s), min(zone.high_s, scenario.work_s))


def _in_memory(scenario: Scenario, best: Prediction) -> Quantity:
    """Fit the memory interval into the durable one; infinity where none is taken."""
    if scenario.memory_interval_s is not None:
        return Quantity(
            name="interval in memory",
            value=best.memory_interval_s or math.inf,
            unit="s",
            how="given",
            source="divides the durable interval",
        )
    return quantity_with_band(
        "best interval in memory",
        "s",
        lambda case: predict(case, best.strategy).how,
        MODEL,
        scenario,
        lambda case: predict(case, best.strategy).memory_interval_s or math.inf,
    )


def _goodput(name: str, scenario: Scenario, strategy: Strategy) -> Quantity:
    job = tuned_job(scenario, strategy)
    return quantity_with_band(
        name,
        "share",
        partial(how_at_other_rate, strategy=strategy, job=job),
        MODEL,
        scenario,
        lambda case: at_other_rate(case, strategy, job).goodput,
    )


def _why(scenario: Scenario, best: Prediction) -> str:
    """Describe the costs that determine the best interval."""
    bounds = {
        "bounded by a flush": scenario.flush_s,
        "bounded by a step": scenario.step_s,
        "once, at the end of the run": scenario.work_s,
    }
    bound = [text for text, at_s in bounds.items() if abs(best.interval_s - at_s) <= CLOSE * at_s]
    return (bound or [BOUGERET if best.strategy == "checkpoint-restart" else MODEL])[0]


def waste(scenario: Scenario, strategy: Strategy, interval_s: float) -> float:
    """Return the share of time that is not useful at this interval.

    All of it where a save could not end before the next begins.
    """
    if interval_s < scenario.flush_s:
        return 1.0
    fixed = replace(scenario, interval_s=interval_s, work_s=max(scenario.work_s, interval_s))
    return 1 - predict(fixed, strategy).outcome.goodput


def _classic(
    name: str, source: str, scenario: Scenario, function: Callable[[float, float], float]
) -> Quantity:
    return quantity_with_band(
        name, "s", "first order", source, scenario, lambda case: function(case.cost_s, mtbf_s(case))
    )
