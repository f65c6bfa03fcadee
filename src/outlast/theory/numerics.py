"""Argument checks, broadcasting over arrays, and special functions without a numerical library."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from outlast.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = float | Sequence[float] | NDArray[Any]

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
SCALARS = frozenset({float, int, bool})


class Broadcasting(Protocol[P, R]):
    """A number for numbers; an array where any argument is an array, a list or a tuple."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __call__(self, *args: Numbers, **kwargs: Numbers) -> NDArray[Any]: ...


def broadcasts(function: Callable[P, R]) -> Broadcasting[P, R]:
    """Apply `function` to each element where arguments are arrays, by NumPy's broadcasting.

    Plain numbers are passed through. `function` is called once per element, and an invalid element
    raises the error that it raises alone. Shapes that cannot be broadcast raise UsageError.
    """
    names = function.__code__.co_varnames  # type: ignore[attr-defined]  # a plain function

    @functools.wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        if SCALARS.issuperset(map(type, args)) and SCALARS.issuperset(map(type, kwargs.values())):
            return function(*args, **kwargs)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if len(arguments) < len(args) + len(kwargs) or not any(map(_is_array, arguments.values())):
            return function(*args, **kwargs)
        return _each(function, arguments)

    return either


def _is_array(value: object) -> bool:
    return isinstance(value, list | tuple) or hasattr(value, "__array__")


def _each(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    import numpy as np

    arrays = {name: np.asarray(value) for name, value in arguments.items()}
    try:
        shape = np.broadcast_shapes(*(array.shape for array in arrays.values()))
    except ValueError:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items() if array.ndim)
        raise UsageError(f"these shapes do not fit together: {shapes}") from None
    columns = [np.broadcast_to(array, shape).ravel().tolist() for array in arrays.values()]
    rows = zip(*columns, strict=True)
    results = [function(**dict(zip(arrays, row, strict=True))) for row in rows]
    if shape == ():
        return results[0]
    return np.array(results, dtype=None if results else float).reshape(shape)


def check_positive(name: str, value: float, *, endless: bool = False) -> None:
    """Check that `value` is above 0, and finite unless `endless`. Raises UsageError."""
    if not value > 0 or (math.isinf(value) and not endless):
        raise UsageError(f"{name} must be above 0{'' if endless else ' and finite'}, not {value!r}")


def check_not_negative(name: str, value: float) -> None:
    """Check that `value` is 0 or above, and finite. Raises UsageError."""
    if not 0 <= value < math.inf:
        raise UsageError(f"{name} must be 0 or above and finite, not {value!r}")


def check_whole(name: str, value: float) -> None:
    """Check that `value` is 0, 1, 2, ... Raises UsageError."""
    check_not_negative(name, value)
    if value != math.floor(value):
        raise UsageError(f"{name} must be a whole number, not {value!r}")


def check_share(name: str, value: float) -> None:
    """Check that `value` lies between 0 and 1. Raises UsageError."""
    if not 0 <= value <= 1:
        raise UsageError(f"{name} is a share, from 0 to 1, not {value!r}")


SHAPE_MIN = 0.1  # below, low quantiles leave the range of floats
SHAPE_MAX = 1e8  # the series needs some sqrt(shape) terms
GAMMA_CLOSE = 1e-13
GAMMA_STEPS_MAX = 200
TINY = 1e-300


def gamma_quantile(shape: float, probability: float) -> float:
    """Return x with P(shape, x) = probability, for a gamma variable of this shape and rate 1.

    Accurate to 1e-10 relative for shapes from 0.1 to 1e6. Newton's iteration in log x, kept
    inside a bracket.
    """
    if not SHAPE_MIN <= shape <= SHAPE_MAX:
        raise UsageError(f"shape must be from {SHAPE_MIN:g} to {SHAPE_MAX:g}, not {shape!r}")
    if not 0 < probability < 1:
        raise UsageError(f"probability must lie between 0 and 1, not {probability!r}")
    low = -math.inf
    high = math.inf
    y = math.log(shape) if shape > 1 else (math.log(probability) + math.lgamma(shape + 1)) / shape
    for _ in range(GAMMA_STEPS_MAX):
        x = math.exp(y)
        miss = gamma_lower(shape, x) - probability
        low, high = (low, y) if miss > 0 else (y, high)
        slope = math.exp(shape * y - x - math.lgamma(shape))
        step = miss / slope if slope > TINY else math.copysign(1.0, miss)
        step = min(max(step, -1.0), 1.0)
        if abs(step) <= GAMMA_CLOSE * max(1.0, abs(y)):
            return math.exp(y - step)
        inside = low < y - step < high
        following = y - step if inside else (low + high) / 2
        y = following
    raise ArithmeticError(f"the {probability!r} quantile of shape {shape!r} did not converge")


def gamma_lower(shape: float, x: float) -> float:
    """Return the regularised lower incomplete gamma function P(shape, x), x > 0.

    Series below shape + 1, Lentz's continued fraction above (Press et al., Numerical Recipes,
    6.2).
    """
    factor = math.exp(shape * math.log(x) - x - math.lgamma(shape + 1))
    if x < shape + 1:
        return factor * _series(shape, x)
    return 1 - factor * shape * _fraction(shape, x)


def poisson_above(count: int, mean: float) -> float:
    """Return P(N > count) of a Poisson variable, count >= -1: P(count + 1, mean). To 1e-9 relative
    for means up to 1e5, in both tails."""
    if count < 0 or mean == 0:
        return 1.0 if count < 0 else 0.0
    return gamma_lower(count + 1, mean)


def poisson_at_most(count: int, mean: float) -> float:
    """Return P(N <= count), count >= 0, as `poisson_above`."""
    shape = count + 1
    if mean < shape + 1:
        return 1 - poisson_above(count, mean)
    return math.exp(shape * math.log(mean) - mean - math.lgamma(shape)) * _fraction(shape, mean)


def erlang_b(servers: int, load: float) -> float:
    """Return the share of time in which all `servers` are busy, where arrivals are then rejected.
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
    c = 1 / TINY
    d = 1 / b
    value = d
    k = 0
    while True:
        k += 1
        a = -k * (k - shape)
        b += 2
        d = 1 / (a * d + b or TINY)
        c = b + a / c or TINY
        value *= c * d
        if abs(c * d - 1) < 1e-16 or k > 100 * math.sqrt(shape) + 1000:
            return value


SMALL = 0.5  # below, (u - 1) e^u + 1 is summed from its series: the closed form cancels
LAMBERT_CLOSE = 1e-6  # a step of this relative size leaves an error of its cube (Halley)
LAMBERT_STEPS_MAX = 64


def one_plus_w0(p: float) -> float:
    """Return u = 1 + W0((p - 1)/e) for p >= 0: the root u >= 0 of (u - 1) e^u + 1 = p.

    Dimensionless. Both optimal intervals have this form. Near the branch point (p -> 0, saves much
    shorter than the time between failures) W0 itself would lose half of its digits; u loses none.
    Accurate to 1e-14 relative. Start: the series at the branch point and at infinity of Corless et
    al. 1996 (Adv. Comput. Math. 5), section 4; then Halley's iteration.
    """
    check_not_negative("p", p)
    if p == 0:
        return 0.0
    u = _start(p)
    for _ in range(LAMBERT_STEPS_MAX):
        miss = _excess(u) - p
        step = miss / (u * math.exp(u) - miss * (u + 1) / (2 * u))
        u -= step
        if abs(step) <= LAMBERT_CLOSE * u:
            return u
    raise ArithmeticError(f"1 + W0(({p!r} - 1)/e) did not converge")


def _start(p: float) -> float:
    if p < 1:
        d = math.sqrt(2 * p)
        return d * (1 - d / 3 + 11 * d * d / 72)
    near = math.log1p((p - 1) / math.e)
    return 1 + (near if near < 1 else near - math.log(near))


def _excess(u: float) -> float:
    """Return (u - 1) e^u + 1 = u^2/2 + u^3/3 + u^4/8 + ... = sum of (k - 1)/k! u^k."""
    if u >= SMALL:
        return (u - 1) * math.exp(u) + 1
    total = 0.0
    power = u  # u^(k - 1)/(k - 1)!
    for k in range(2, 24):
        power_next = power * u / k
        total += (k - 1) * power_next
        power = power_next
    return total


ROOT_STEPS_MAX = 200
ROOT_CLOSE = 1e-14
GOLDEN = (math.sqrt(5) - 1) / 2
MINIMUM_CLOSE = 1e-8  # of log x: nearer, values differ by their rounding alone
NEAR_STEPS_MAX = 6  # from a guess, by a factor of 2 each
MINIMUM_STEPS_MAX = 200


def find_root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the root of `function` between `low` and `high` (both above 0). `function` has
    opposite signs at the ends. Bisection in log x, to 1e-14 relative."""
    rises = function(high) > 0
    if (function(low) > 0) == rises:
        raise ArithmeticError(f"no change of sign between {low!r} and {high!r}")
    for _ in range(ROOT_STEPS_MAX):
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = (low, middle) if (function(middle) > 0) == rises else (middle, high)
        if high - low <= ROOT_CLOSE * high:
            break
    return math.sqrt(low) * math.sqrt(high)


def find_minimum(
    function: Callable[[float], float], low: float, high: float, *, near: float | None = None
) -> float:
    """Return the minimum of `function` between `low` and `high` (both above 0).

    `function` falls, then rises; where it is flat beside its minimum, the flat part is taken to lie
    on the high side, as infinite values are. Brent's method in log x: steps to the minimum of a
    parabola, or of the golden section where they do not converge (Brent 1973, chapter 5). x is
    known to 1e-7 relative, the value to the last digits. `near`: a guess, which saves most of the
    steps where it is good.
    """
    bottom, top = math.log(low), math.log(high)
    # The best point, the second best one, and the second best one before, with their values.
    points = _beside(function, math.log(near), low, high) if near else None
    if points:
        (best, at_best), (second, at_second), (third, at_third) = points
        bottom, top = min(second, third), max(second, third)
    else:
        best = second = third = bottom + (1 - GOLDEN) * (top - bottom)
        at_best = at_second = at_third = function(math.exp(best))
    step = before = top - bottom if points else 0.0
    for _ in range(MINIMUM_STEPS_MAX):
        middle = (bottom + top) / 2
        if abs(best - middle) <= 2 * MINIMUM_CLOSE - (top - bottom) / 2:
            break
        parabola = _parabola(
            (best, at_best), (second, at_second), (third, at_third), (bottom, top), before / 2
        )
        before = step
        if parabola is None:
            before = (top if best < middle else bottom) - best
            parabola = (1 - GOLDEN) * before
            if (
                0 < abs(step) < 1.5 * MINIMUM_CLOSE
            ):  # it has converged: look at the other side, nearby
                parabola = math.copysign(2 * MINIMUM_CLOSE, before)
        step = parabola
        trial = best + (step if abs(step) >= MINIMUM_CLOSE else math.copysign(MINIMUM_CLOSE, step))
        value = function(math.exp(trial))
        if value < at_best or (value == at_best and trial < best):
            bottom, top = (best, top) if trial > best else (bottom, best)
            third, at_third = second, at_second
            second, at_second = best, at_best
            best, at_best = trial, value
            continue
        bottom, top = (trial, top) if trial < best else (bottom, trial)
        if value <= at_second or second == best:
            third, at_third = second, at_second
            second, at_second = trial, value
        elif value <= at_third or third in (best, second):
            third, at_third = trial, value
    return math.exp(best)


_Point: TypeAlias = tuple[float, float]


def _beside(
    function: Callable[[float], float], near: float, low: float, high: float
) -> tuple[_Point, _Point, _Point] | None:
    """Return a point beside a guess, the best of three, and the other two, on both sides of it.

    None where no minimum is near, or the function is flat there.
    """
    bottom, step, top = math.log(low), math.log(2), math.log(high)
    values: dict[int, float] = {}
    at = 0  # in steps from the guess
    for _ in range(NEAR_STEPS_MAX):
        beside = [min(max(near + step * number, bottom), top) for number in (at - 1, at, at + 1)]
        for number, place in zip((at - 1, at, at + 1), beside, strict=True):
            if number not in values:
                values[number] = function(min(max(math.exp(place), low), high))
        before, middle, after = (values[number] for number in (at - 1, at, at + 1))
        if middle in (before, after) or not math.isfinite(before + after):
            return None
        if before > middle < after:
            ends = sorted(((before, beside[0]), (after, beside[2])))
            second, third = ((place, value) for value, place in ends)
            return (beside[1], middle), second, third
        at += -1 if before < after else 1
    return None


def _parabola(
    best: _Point, second: _Point, third: _Point, ends: tuple[float, float], longest: float
) -> float | None:
    """Return the step from the best point to the minimum of the parabola through all three.

    None where it leads out of the ends, or is not shorter than `longest`.
    """
    near, far = best[0] - second[0], best[0] - third[0]
    rise, other = near * (best[1] - third[1]), far * (best[1] - second[1])
    below = 2 * (other - rise)
    if not below or not math.isfinite(below):
        return None
    step = -(far * other - near * rise) / below
    if not abs(step) < abs(longest):
        return None
    edge = 2 * MINIMUM_CLOSE
    if not ends[0] + edge < best[0] + step < ends[1] - edge:
        return None
    return step
