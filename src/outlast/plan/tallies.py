"""What simulated runs come to, in one figure: its mean, its spread, and what theory says of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from outlast.plan.answers import HIGH, LOW, Unit
from outlast.plan.scenario import Scenario
from outlast.plan.strategies import cost_usd

if TYPE_CHECKING:
    from outlast.plan.summary import Summary

Z_MAX, DIFFERS_MIN = 4.0, 0.01


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """Of all runs: mean and its standard error, P5, median and P95, and what theory says of the
    mean, with the difference in standard errors. None where there is no such figure."""

    name: str
    unit: Unit
    mean: float
    error: float | None
    low: float
    middle: float
    high: float
    predicted: float | None = None
    z: float | None = None

    def differs(self) -> float:
        """By which share the mean is above what theory says of it; 0 where that may be chance, or
        is below one per cent."""
        if not self.z or not self.predicted or abs(self.z) < Z_MAX:
            return 0.0
        share = self.mean / self.predicted - 1
        return share if abs(share) > DIFFERS_MIN else 0.0


def tally(
    name: str, unit: Unit, of: Summary, predicted: float | None = None, *, times: float = 1.0
) -> Tally:
    """`times` turns what was summed into `unit`."""
    mean, error = times * of.mean, None if math.isnan(of.error) else times * of.error
    z = None
    if predicted is not None and error and math.isfinite(predicted):
        z = (mean - predicted) / error
    low, middle, high = (times * of.quantile(one) for one in (LOW, 0.5, HIGH))
    return Tally(
        name=name, unit=unit, mean=mean, error=error, low=low, middle=middle, high=high,
        predicted=predicted, z=z,
    )  # fmt: skip


def usd_per_s(scenario: Scenario, spares: int) -> float:
    """What a second of the run costs, spares included."""
    return cost_usd(scenario, 1.0, spares)


def without_advice(warnings: list[str]) -> list[str]:
    """Theory's, less where it is simulated: that is here."""
    return [text.partition("; `outlast")[0] for text in warnings]
