"""A binary heap of times, each with a number, in two tables."""

from __future__ import annotations

from outlast.plan.compiled import compiled
from outlast.plan.job import Table


@compiled
def push(times_s: Table, numbers: Table, size: int, time_s: float, number: int) -> None:
    """Add an entry to a heap of `size`."""
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if times_s[above] <= time_s:
            break
        times_s[at], numbers[at] = times_s[above], numbers[above]
        at = above
    times_s[at], numbers[at] = time_s, number


@compiled
def pop(times_s: Table, numbers: Table, size: int) -> None:
    """Take the earliest entry, the first one, out of a heap of `size`."""
    last = size - 1
    time_s, number = times_s[last], numbers[last]
    at, below = 0, 1
    while below < last:
        below += times_s[below + 1] < times_s[below]  # below + 1 may be `last`, which is no harm
        if times_s[below] >= time_s:
            break
        times_s[at], numbers[at] = times_s[below], numbers[below]
        at, below = below, 2 * below + 1
    times_s[at], numbers[at] = time_s, number
