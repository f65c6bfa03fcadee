"""Where a function crosses nothing, and where it is least; for functions of positive numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

STEPS_MAX = 200
CLOSE = 1e-14
GOLDEN = (math.sqrt(5) - 1) / 2


def root(function: Callable[[float], float], low: float, high: float) -> float:
    """x between `low` and `high` (both above 0) with function(x) = 0; `function` has opposite signs
    at the ends. Bisection in log x, to 1e-14 relative."""
    rises = function(high) > 0
    if (function(low) > 0) == rises:
        raise ArithmeticError(f"no change of sign between {low!r} and {high!r}")
    for _ in range(STEPS_MAX):
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = (low, middle) if (function(middle) > 0) == rises else (middle, high)
        if high - low <= CLOSE * high:
            break
    return math.sqrt(low) * math.sqrt(high)


def least(function: Callable[[float], float], low: float, high: float) -> float:
    """x between `low` and `high` (both above 0) where `function` is least: it falls, then rises.

    Golden section in log x. Where the least value is flat, x is known to 1e-7 relative, the value
    to the last digits. Infinite values are taken to lie on the high side.
    """
    bottom, top = math.log(low), math.log(high)
    left, right = top - GOLDEN * (top - bottom), bottom + GOLDEN * (top - bottom)
    at_left, at_right = function(math.exp(left)), function(math.exp(right))
    while top - bottom > 1e-9:
        if at_left <= at_right:
            top, right, at_right = right, left, at_left
            left = top - GOLDEN * (top - bottom)
            at_left = function(math.exp(left))
        else:
            bottom, left, at_left = left, right, at_right
            right = bottom + GOLDEN * (top - bottom)
            at_right = function(math.exp(right))
    return math.exp((bottom + top) / 2)
