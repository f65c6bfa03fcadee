"""What slow workers cost a job in which all wait for the slowest, every step."""

from __future__ import annotations

import math

from outlast.errors import UsageError
from outlast.theory.arrays import broadcasts
from outlast.theory.checks import not_negative, positive, share

CELLS = 400  # Simpson's rule over the normal density; 1e-9 of the maximum's mean
LOW, HIGH = -8.5, 12.0  # beyond, nothing of the maximum of up to 1e20 lies
WORKERS_MAX = 1e20


@broadcasts
def any_slow(probability: float, workers: int) -> float:
    """The probability that at least one of `workers` is slow in a step: 1 - (1 - p)^N. Exact for
    workers that are slow independently of each other."""
    share("probability", probability)
    positive("workers", workers)
    return -math.expm1(workers * math.log1p(-probability)) if probability < 1 else 1.0


@broadcasts
def step_slowdown(probability: float, workers: int, factor: float) -> float:
    """The mean length of a step over that of one without stragglers, where a slow worker takes
    `factor` times as long: 1 + (factor - 1) `any_slow`. Exact."""
    if not 1 <= factor < math.inf:
        raise UsageError(f"factor must be 1 or above and finite, not {factor!r}")
    return 1 + (factor - 1) * any_slow(probability, workers)


@broadcasts
def slowest_s(mean_s: float, deviation_s: float, workers: int) -> float:
    """Mean seconds of the slowest of `workers` whose steps are normally distributed: mean +
    deviation x E[max of N]. By quadrature, to 1e-8 of the deviation; above `slowest_at_most_s`
    never."""
    positive("mean_s", mean_s)
    not_negative("deviation_s", deviation_s)
    if not 1 <= workers <= WORKERS_MAX:
        raise UsageError(f"workers must be from 1 to {WORKERS_MAX:g}, not {workers!r}")
    return mean_s + deviation_s * _highest(workers)


@broadcasts
def slowest_at_most_s(mean_s: float, deviation_s: float, workers: int) -> float:
    """The usual estimate, mean + deviation x sqrt(2 ln N): an upper bound, approached slowly (15 %
    more than the deviation's part at a thousand workers)."""
    positive("mean_s", mean_s)
    not_negative("deviation_s", deviation_s)
    positive("workers", workers)
    return mean_s + deviation_s * math.sqrt(2 * math.log(workers))


def _highest(workers: float) -> float:
    """E[max] = HIGH - integral of Phi(x)^N up to HIGH."""
    step = (HIGH - LOW) / CELLS
    total = 0.0
    for k in range(CELLS + 1):
        weight = 1 if k in {0, CELLS} else 4 if k % 2 else 2
        total += weight * _below(LOW + k * step) ** workers
    return HIGH - total * step / 3


def _below(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))
