"""The gamma distribution and, through it, Poisson's, without a numerical library."""

from __future__ import annotations

import math

from outlast.errors import UsageError

SHAPE_MIN = 0.1  # below, low quantiles leave the range of floats
SHAPE_MAX = 1e8  # the series needs some sqrt(shape) terms
CLOSE = 1e-13
STEPS_MAX = 200
TINY = 1e-300


def quantile(shape: float, probability: float) -> float:
    """x with P(shape, x) = probability, for a gamma variable of this shape and rate 1.

    Accurate to 1e-10 relative for shapes from 0.1 to 1e6. Newton's iteration in log x, kept
    inside a bracket.
    """
    if not SHAPE_MIN <= shape <= SHAPE_MAX:
        raise UsageError(f"shape must be from {SHAPE_MIN:g} to {SHAPE_MAX:g}, not {shape!r}")
    if not 0 < probability < 1:
        raise UsageError(f"probability must lie between 0 and 1, not {probability!r}")
    low, high = -math.inf, math.inf
    y = math.log(shape) if shape > 1 else (math.log(probability) + math.lgamma(shape + 1)) / shape
    for _ in range(STEPS_MAX):
        x = math.exp(y)
        miss = lower(shape, x) - probability
        low, high = (low, y) if miss > 0 else (y, high)
        slope = math.exp(shape * y - x - math.lgamma(shape))
        step = miss / slope if slope > TINY else math.copysign(1.0, miss)
        step = min(max(step, -1.0), 1.0)
        if abs(step) <= CLOSE * max(1.0, abs(y)):
            return math.exp(y - step)
        inside = low < y - step < high
        following = y - step if inside else (low + high) / 2
        y = following
    raise ArithmeticError(f"the {probability!r} quantile of shape {shape!r} did not converge")


def lower(shape: float, x: float) -> float:
    """The regularised lower incomplete gamma function P(shape, x), x > 0.

    Series below shape + 1, Lentz's continued fraction above (Press et al., Numerical Recipes,
    6.2).
    """
    factor = math.exp(shape * math.log(x) - x - math.lgamma(shape + 1))
    if x < shape + 1:
        return factor * _series(shape, x)
    return 1 - factor * shape * _fraction(shape, x)


def poisson_above(count: int, mean: float) -> float:
    """P(N > count) of a Poisson variable, count >= -1: P(count + 1, mean). To 1e-9 relative for
    means up to 1e5, in both tails."""
    if count < 0 or mean == 0:
        return 1.0 if count < 0 else 0.0
    return lower(count + 1, mean)


def poisson_at_most(count: int, mean: float) -> float:
    """P(N <= count), count >= 0, as `poisson_above`."""
    shape = count + 1
    if mean < shape + 1:
        return 1 - poisson_above(count, mean)
    return math.exp(shape * math.log(mean) - mean - math.lgamma(shape)) * _fraction(shape, mean)


def erlang_b(servers: int, load: float) -> float:
    """The share of time in which all `servers` are busy, where what comes then goes away:
    P(N = servers)/P(N <= servers) of a Poisson variable with mean `load`. Exact for any service
    times. Erlang 1917; Sevastyanov 1957 for the insensitivity."""
    if load == 0:
        return 0.0 if servers else 1.0
    if load >= servers + 2:
        return 1 / (load * _fraction(servers + 1, load))
    log_point = servers * math.log(load) - load - math.lgamma(servers + 1)
    return math.exp(log_point) / poisson_at_most(servers, load)


def _series(shape: float, x: float) -> float:
    term = total = 1.0
    k = shape
    while term > total * 1e-17:
        k += 1
        term *= x / k
        total += term
    return total


def _fraction(shape: float, x: float) -> float:
    b = x + 1 - shape
    c, d = 1 / TINY, 1 / b
    value, k = d, 0
    while True:
        k += 1
        a = -k * (k - shape)
        b += 2
        d = 1 / (a * d + b or TINY)
        c = b + a / c or TINY
        value *= c * d
        if abs(c * d - 1) < 1e-16 or k > 100 * math.sqrt(shape) + 1000:
            return value
