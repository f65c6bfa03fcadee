"""Answer of the planner's page, by the closed forms of `outlast plan`.

Pure functions of a question. Bands are those of the failure rate: intervals and spares stay as
chosen for its mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

from outlast.plan.model.answer_values import Quantity, Unit, format_quantity, quantity_with_band
from outlast.plan.model.formula_domain import of_rate
from outlast.plan.model.ladder_costs import STRATEGIES, Strategy, mtbf_s
from outlast.plan.model.scenario import Scenario
from outlast.plan.model.strategy_prediction import (
    GOODPUT_MIN,
    Prediction,
    at_other_rate,
    cost_usd,
    predict,
    reason_impossible,
    tuned_job,
)
from outlast.theory.strategies import RecoveryOutcome
from outlast.web.page_figures import WaterfallRow
from outlast.web.planner_query import PlannerQuery
from outlast.web.run_answers import PageAnswer

LINES_MAX = 2048  # while the value of its axis moves, curves stay
# Shares of wall time by the name of their colour, name and meaning; useful work comes last.
_SHARES: dict[str, tuple[str, str, Callable[[RecoveryOutcome], float]]] = {
    "checkpoint": ("save", "saves that block, and slower steps beside them", lambda o: o.save),
    "lost": ("redo", "work and saves that a failure undid", lambda o: o.redo),
    "start": ("detect", "from a failure until it is detected", lambda o: o.detect),
    "recovery": ("recover", "from detection until the job works again", lambda o: o.recover),
    "down": ("wait", "for a repaired node", lambda o: o.wait),
    "script": ("degraded", "work that missing replicas did not do", lambda o: o.degraded),
    "step": ("goodput", "work that counts", lambda o: o.goodput),
}


class StrategyLine(NamedTuple):
    """A strategy with its prediction; None where it is impossible (`why`)."""

    strategy: Strategy
    predicted: Prediction | None
    why: str


class PlannerAnswer(NamedTuple):
    """Everything that the page shows beside its curves."""

    query: PlannerQuery
    wall_s: float  # infinity: never
    answers: tuple[PageAnswer, ...]
    shares: list[WaterfallRow]
    lines: list[StrategyLine]
    warnings: list[str]


def planner_answer(query: PlannerQuery) -> PlannerAnswer:
    """Answer a question. Raises UsageError naming the invalid field."""
    lines = [strategy_line(query.scenario, strategy) for strategy in STRATEGIES]
    chosen = next(line for line in lines if line.strategy == query.strategy)
    if chosen.predicted is None:
        impossible = PageAnswer(
            key="impossible",
            question="Which strategy?",
            figure=f"{query.strategy} is impossible",
            lines=(f"it {chosen.why}",),
            level="bad",
        )
        return PlannerAnswer(query, math.inf, (impossible,), [], lines, [])
    best = cheapest(lines)
    return PlannerAnswer(
        query=query,
        wall_s=chosen.predicted.wall_s,
        answers=_answers(query.scenario, chosen.predicted, best),
        shares=_shares(chosen.predicted),
        lines=lines,
        warnings=chosen.predicted.warnings,
    )


@lru_cache(LINES_MAX)
def strategy_line(scenario: Scenario, strategy: Strategy) -> StrategyLine:
    """Return a strategy with its prediction. Raises UsageError naming the invalid field."""
    why = reason_impossible(scenario, strategy)
    return StrategyLine(strategy, None if why else predict(scenario, strategy), why)


def cheapest(lines: list[StrategyLine]) -> Prediction:
    """Return the cheapest prediction; the simplest one of equal ones."""
    possible = [line.predicted for line in lines if line.predicted is not None]
    return min(possible, key=lambda predicted: predicted.usd)


def _answers(scenario: Scenario, of: Prediction, best: Prediction) -> tuple[PageAnswer, ...]:
    job = tuned_job(scenario, of.strategy)

    def goodput(case: Scenario) -> float:
        return at_other_rate(case, of.strategy, job).goodput

    def wall_s(case: Scenario) -> float:
        share = goodput(case)
        return scenario.work_s / share if share >= GOODPUT_MIN else math.inf

    figure = partial(_with_band, scenario, of)
    shares = figure("goodput", "share", goodput)
    takes = figure("takes", "s", wall_s)
    costs = figure("costs", "USD", lambda case: cost_usd(scenario, wall_s(case), of.spares))
    ends = of.wall_s < math.inf
    return (
        PageAnswer(
            key="goodput",
            question="Goodput (ETTR)",
            figure=format_quantity(of.outcome.goodput, "share"),
            lines=(_band(shares), "share of wall time that is work which counts"),
            level="good" if of.outcome.goodput >= 0.9 else "warn" if ends else "bad",
        ),
        PageAnswer(
            key="finish",
            question="Finish",
            figure=f"after {format_quantity(of.wall_s, 's')}" if ends else "never",
            lines=(_band(takes), f"for {format_quantity(scenario.work_s, 's')} of work"),
            level="plain" if ends else "bad",
        ),
        PageAnswer(
            key="dollars",
            question="Dollars",
            figure=format_quantity(of.usd, "USD"),
            lines=(_band(costs), _dearer(of, best)),
            level="plain" if ends else "bad",
        ),
        _failures(scenario, of),
        _settings(scenario, of),
        _regime(of),
    )


def _with_band(
    scenario: Scenario,
    of: Prediction,
    name: str,
    unit: Unit,
    function: Callable[[Scenario], float],
) -> Quantity:
    return quantity_with_band(name, unit, of.how, "", scenario, function)


def _band(of: Quantity) -> str:
    if of.low is None or of.high is None:
        return "the failure rate is taken as exact"
    low, high = (format_quantity(end, of.unit) for end in (of.low, of.high))
    return f"{low} to {high}: 90 % band of the failure rate"


def _dearer(of: Prediction, best: Prediction) -> str:
    if of.usd <= best.usd:
        return "no strategy is cheaper"
    if math.isinf(of.usd):
        return f"{best.strategy} ends"
    saves = format_quantity(of.usd - best.usd, "USD")
    return f"{best.strategy} costs {saves} less"


def _failures(scenario: Scenario, of: Prediction) -> PageAnswer:
    between = quantity_with_band("between", "s", of_rate, "", scenario, mtbf_s)
    count = of.outcome.failures_per_s * of.wall_s
    lines = [_band(between)]
    if of.wall_s < math.inf:
        lines.append(f"{format_quantity(round(count), '')} failures until the finish")
    return PageAnswer(
        key="failures",
        question="Failures of the job",
        figure=f"every {format_quantity(between.value, 's')}",
        lines=(*lines, f"{scenario.failures.name}: {scenario.failures.source}"),
        level="plain",
    )


def _settings(scenario: Scenario, of: Prediction) -> PageAnswer:
    how = "as given" if scenario.interval_s else "the best one"
    lines = [f"work between durable saves, {how}"]
    if of.memory_interval_s is not None:
        lines.append(f"a version in memory every {format_quantity(of.memory_interval_s, 's')}")
    return PageAnswer(
        key="interval",
        question="Interval and spares",
        figure=format_quantity(of.interval_s, "s"),
        lines=(*lines, f"{of.spares:,} spare nodes beside {scenario.nodes:,}"),
        level="plain",
    )


def _regime(of: Prediction) -> PageAnswer:
    inside = of.outcome.in_regime
    figure = of.how if inside else "outside the regime"
    if of.how == "exact":
        line = "the closed form holds for this scenario in the long run"
    elif inside:
        line = "the closed form neglects second failures; it is close here"
    else:
        line = "the closed form is a guess here; simulate it with the command below"
    return PageAnswer(
        key="regime",
        question="Regime of the formula",
        figure=figure,
        lines=(line,),
        level="good" if of.how == "exact" else "plain" if inside else "warn",
    )


def _shares(of: Prediction) -> list[WaterfallRow]:
    rows: list[WaterfallRow] = []
    at = 1.0
    wall_s = of.wall_s
    for look, (name, what, share) in _SHARES.items():
        width = share(of.outcome)
        if not width and look != "step":
            continue
        at = max(0.0, at - width)
        rows.append(WaterfallRow(name, at, width, width * wall_s, what, look))
    return rows
