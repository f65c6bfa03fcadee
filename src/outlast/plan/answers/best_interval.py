"""Best save interval of a strategy, and the cost of missing it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from outlast.controller.save_schedule.schedule_explanation import span
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
from outlast.theory import intervals

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
        quantity_with_band(
            "between failures of the job",
            "s",
            formula_domain.of_rate,
            "rates add up",
            scenario,
            mtbf_s,
        ),
        quantity_with_band(
            "best interval",
            "s",
            hows,
            _why(tuned, best),
            tuned,
            lambda one: predict(one, strategy).interval_s,
        ),
        _classic("Young's interval", "Young 1974", tuned, intervals.young),
        _classic("Daly's interval", "Daly 2006, series", tuned, intervals.daly),
        _goodput("goodput at the best", tuned, strategy),
    ]
    warnings = list(best.warnings)
    if best.memory_interval_s is not None:
        quantities.insert(2, _in_memory(tuned, best))
        if quantities[2].high == math.inf:
            warnings.append("at an end of the rate's band no versions in memory are taken")
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
            source="a whole number of them in the other",
        )
    return quantity_with_band(
        "best interval in memory",
        "s",
        lambda one: predict(one, best.strategy).how,
        MODEL,
        scenario,
        lambda one: predict(one, best.strategy).memory_interval_s or math.inf,
    )


def _goodput(name: str, scenario: Scenario, strategy: Strategy) -> Quantity:
    job = tuned_job(scenario, strategy)
    return quantity_with_band(
        name,
        "share",
        partial(how_at_other_rate, strategy=strategy, job=job),
        MODEL,
        scenario,
        lambda one: at_other_rate(one, strategy, job).goodput,
    )


def _why(scenario: Scenario, best: Prediction) -> str:
    """Describe the costs that determine the best interval."""
    bounds = {
        "a flush, and no sooner": scenario.flush_s,
        "a step, and no sooner": scenario.step_s,
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
        name, "s", "first order", source, scenario, lambda one: function(one.cost_s, mtbf_s(one))
    )
