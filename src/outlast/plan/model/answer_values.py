"""Quantities with band, unit and source, and their text."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Literal, get_args

import msgspec
from msgspec.structs import replace

from outlast.controller.save_schedule.save_intervals import NEVER_S, span
from outlast.plan.model.rates import EXACT
from outlast.plan.model.scenario import FIELDS, Scenario, default_text

Unit = Literal["s", "share", "USD", "GPUs", "nodes", "bytes", "bytes/s", "1/s", "runs", "times", ""]
How = Literal["exact", "first order", "simulated", "given"]
Cause = Literal["work", "save", "redo", "detect", "restart", "wait", "slow"]  # of a run's time
CAUSES: tuple[Cause, ...] = get_args(Cause)
# Ends of a 90 % band.
LOW = 0.05
HIGH = 0.95


class Quantity(msgspec.Struct, frozen=True, kw_only=True):
    """A value with its 90 % band (`low`, `high`), None where it is certain.

    Infinity is the time or price of a run without end; JSON writes it as null.
    """

    name: str
    value: float
    unit: Unit
    low: float | None = None
    high: float | None = None
    how: How
    source: str = ""


class Assumed(msgspec.Struct, frozen=True):
    """A field of the scenario that was not given, and its default."""

    key: str
    text: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to one question about one scenario.

    `warnings`: inputs outside a formula's regime, and omissions.
    """

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
    """Return an answer with its assumptions among the keys in `about`, and the rate's source."""
    rate = scenario.failures
    untold = scenario.assumed & set(about)
    return Answer(
        question=question,
        failures=f"{rate.name}: {rate.source}",
        quantities=quantities,
        assumed=[Assumed(f.key, default_text(scenario, f)) for f in FIELDS if f.key in untold],
        warnings=warnings,
    )


def at_rate(scenario: Scenario, probability: float) -> Scenario:
    """Return the scenario at this quantile of its failure rate."""
    rate = scenario.failures
    sure = replace(rate, per_gpu_s=rate.at(probability), weight_failures=EXACT)
    return replace(scenario, failures=sure)


def quantity_with_band(
    name: str,
    unit: Unit,
    how: How | Callable[[Scenario], How],
    source: str,
    scenario: Scenario,
    function: Callable[[Scenario], float],
) -> Quantity:
    """Return `function` of the scenario, with the band from the failure rate's.

    The band is that at the ends of the rate's 90 % interval, exact for monotonic functions; the
    value itself always lies in it. A `how` that depends on the rate is exact only if it is at both
    ends, too.
    """
    value = function(scenario)
    low = None
    high = None
    shown = [scenario]
    if scenario.failures.weight_failures != EXACT:
        shown += [at_rate(scenario, probability) for probability in (LOW, HIGH)]
        ends = [function(case) for case in shown[1:]]
        low = min(value, *ends)
        high = max(value, *ends)
    hows: list[How] = [how(case) for case in shown] if callable(how) else [how]
    return Quantity(
        name=name, value=value, unit=unit, low=low, high=high, how=_least_sure(hows), source=source
    )


def _least_sure(hows: Sequence[How]) -> How:
    for how in hows:
        if how != "exact":
            return how
    return "exact"


_LARGE = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_PLAIN_MAX = 1e5
YEAR_S = 365 * 86400.0
AGES_S = 1e6 * YEAR_S  # longer than any run
SHARE_MIN = 1e-5  # smaller positive shares are printed as "<0.001 %"


def format_quantity(value: float, unit: Unit) -> str:
    """Format a value with three digits, in a customary unit."""
    if math.isinf(value):
        return "never" if unit == "s" else "infinite"
    if unit == "s":
        if value < NEVER_S:
            return span(value)
        return f"{_large(value / YEAR_S)} y" if value < AGES_S else "> 1M y"
    if unit == "share":
        return f"{100 * value:.3g} %" if not 0 < value < SHARE_MIN else "<0.001 %"
    if unit == "USD":
        sign = "-" if value < 0 else ""
        return f"{sign}${_large(abs(value)).replace('G', 'B')}"
    if unit in ("bytes", "bytes/s"):
        return f"{_large(value, ' ')}{'B' if unit == 'bytes' else 'B/s'}"
    whole = value == int(value) and abs(value) < _PLAIN_MAX
    return f"{int(value):,}" if whole else _large(value)


def format_count(count: int, one: str, more: str = "") -> str:
    """Format a count: `1 node`, `2 nodes`, `no node`."""
    noun = one if count in (0, 1) else more or f"{one}s"
    return f"{count:,} {noun}" if count else f"no {noun}"


def _large(value: float, gap: str = "") -> str:
    value = float(f"{value:.3g}")  # first, or 999.9 is written with an exponent
    for size, prefix in _LARGE:
        if abs(value) >= size:
            return f"{value / size:.3g}{gap}{prefix}"
    return f"{value:.3g}{gap}"
