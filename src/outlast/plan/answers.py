"""What every question is answered with: figures, each with its band, its unit and its source."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from outlast.plan.rates import EXACT
from outlast.plan.scenario import FIELDS, Scenario, taken

Unit = Literal["s", "share", "USD", "GPUs", "nodes", "bytes", "bytes/s", "1/s", "runs", "times", ""]
How = Literal["exact", "first order", "simulated", "given"]
LOW, HIGH = 0.05, 0.95  # ends of a 90 % band


class Quantity(msgspec.Struct, frozen=True, kw_only=True):
    """`low` and `high` end its 90 % band, None where nothing makes it uncertain. Infinity is a
    time or a price that no end has; JSON writes it as null."""

    name: str
    value: float
    unit: Unit
    low: float | None = None
    high: float | None = None
    how: How
    source: str = ""


class Assumed(msgspec.Struct, frozen=True):
    """A field of the scenario that was not given, and what it was taken for."""

    key: str
    text: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """To one question about one scenario. `warnings`: what lies outside a formula's regime, or was
    left out."""

    question: str
    failures: str
    quantities: list[Quantity]
    assumed: list[Assumed]
    warnings: list[str]


def answer(
    question: str,
    scenario: Scenario,
    quantities: list[Quantity],
    warnings: list[str],
    about: Collection[str],
) -> Answer:
    """With what was assumed of `scenario`, of the keys that it is `about`, and where its failure
    rate is from."""
    rate, untold = scenario.failures, scenario.assumed & set(about)
    return Answer(
        question=question, failures=f"{rate.name}: {rate.source}", quantities=quantities,
        assumed=[Assumed(f.key, taken(scenario, f)) for f in FIELDS if f.key in untold],
        warnings=warnings,
    )  # fmt: skip


def at_rate(scenario: Scenario, probability: float) -> Scenario:
    """The scenario with the failure rate that the true one is below with this probability."""
    rate = scenario.failures
    sure = replace(rate, per_gpu_s=rate.at(probability), weight_failures=EXACT)
    return replace(scenario, failures=sure)


def banded(
    name: str,
    unit: Unit,
    how: How | Callable[[Scenario], How],
    source: str,
    scenario: Scenario,
    function: Callable[[Scenario], float],
) -> Quantity:
    """`function` of the scenario, with the band that the failure rate's own gives it: where the
    rate's 90 % interval leads, exact for what rises or falls with the rate throughout; the value
    itself always lies in it. `how`, where it depends on the rate: exact if it is so at both ends
    of the band, too."""
    value, low, high = function(scenario), None, None
    shown = [scenario]
    if scenario.failures.weight_failures != EXACT:
        shown += [at_rate(scenario, probability) for probability in (LOW, HIGH)]
        ends = [function(one) for one in shown[1:]]
        low, high = min(value, *ends), max(value, *ends)
    hows: list[How] = [how(one) for one in shown] if callable(how) else [how]
    return Quantity(
        name=name, value=value, unit=unit, low=low, high=high, how=_least_sure(hows), source=source
    )  # fmt: skip


def _least_sure(hows: Sequence[How]) -> How:
    for one in hows:
        if one != "exact":
            return one
    return "exact"
