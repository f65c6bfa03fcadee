"""Failures whose gaps are spread evenly between two lengths, as an experiment injects them: exact
means, without drawing a number.

Gaps end where the next failure strikes. They run on while the job recovers (`clock`), or begin
when it works again; an experiment's description seldom says which. Any unit of time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from outlast.errors import UsageError


class Gaps(NamedTuple):
    """From one failure to the next: uniform from `low` to `high`, independent."""

    low: float
    high: float


class Run(NamedTuple):
    """Mean wall time, the standard deviation of one run's, and the mean number of failures."""

    wall: float
    deviation: float
    failures: float


class _Left(NamedTuple):
    """Mean, mean square, and failures of what is left of a run."""

    mean: float
    square: float
    failures: float


def failures(gaps: Gaps, work: float, *, pause: float = 0.0, clock: bool = True) -> float:
    """Mean number of failures of a job that loses nothing to them but `pause` each. Exact.

    With `clock` the n-th strikes if n gaps sum to at most the work and n - 1 pauses; the sum of
    uniform numbers is distributed as Irwin (1927) and Hall found.
    """
    if clock and pause >= gaps.low:
        raise UsageError(f"a pause of {pause:g} outlasts the shortest gap, {gaps.low:g}")
    held = pause if clock else 0.0
    total, n = 0.0, 1
    while n * gaps.low < work + (n - 1) * held:
        total += _sum_below(n, (work + (n - 1) * held - n * gaps.low) / (gaps.high - gaps.low))
        n += 1
    return total


def paused(gaps: Gaps, work: float, pause: float, *, clock: bool = True) -> float:
    """Mean wall time of such a job: its work and its pauses."""
    return work + pause * failures(gaps, work, pause=pause, clock=clock)


def restarted(
    gaps: Gaps, saves: int, interval: float, restart: float, *, clock: bool = True
) -> Run:
    """A job of `saves` times `interval` of work, saved after each, that goes back to its last save
    and spends `restart` at each failure. Exact; by recursion over the intervals that are left.

    Raises UsageError where a gap could end in a restart or before an interval's end.
    """
    held = restart if clock else 0.0
    later = Gaps(gaps.low - held, gaps.high - held)
    if later.low < interval:
        raise UsageError(f"a gap may leave {later.low:g}, too short for {interval:g} of work")
    left = [_Left(0.0, 0.0, 0.0)]
    for _ in range(saves - 1):
        left.append(_from_here(later, interval, restart, left))
    whole = _from_here(gaps, interval, restart, left)
    return Run(whole.mean, math.sqrt(whole.square - whole.mean**2), whole.failures)


def _from_here(gaps: Gaps, interval: float, restart: float, left: list[_Left]) -> _Left:
    """What is left of a run with `len(left)` intervals to do, none of them begun, at the beginning
    of a gap; `left` holds the same for fewer."""
    rest, width = len(left) * interval, gaps.high - gaps.low
    mean = square = count = 0.0
    done, start = int(gaps.low // interval), gaps.low
    while done < len(left) and start < gaps.high:
        end = min(gaps.high, (done + 1) * interval)
        chance, middle = (end - start) / width, (start + end) / 2
        then = left[len(left) - done]
        spent, spread = middle + restart, (end - start) ** 2 / 12
        mean += chance * (spent + then.mean)
        square += chance * (spent**2 + spread + 2 * spent * then.mean + then.square)
        count += chance * (1 + then.failures)
        done, start = done + 1, end
    survives = max(0.0, gaps.high - max(gaps.low, rest)) / width
    return _Left(mean + survives * rest, square + survives * rest**2, count)


def _sum_below(count: int, x: float) -> float:
    """The probability that `count` numbers, uniform from 0 to 1, sum to at most x."""
    if x >= count:
        return 1.0
    terms = (
        (-1) ** k * math.comb(count, k) * (x - k) ** count / math.factorial(count)
        for k in range(math.floor(x) + 1)
    )
    return math.fsum(terms)
