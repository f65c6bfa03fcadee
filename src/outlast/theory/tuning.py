"""The interval, and the number of snapshots in it, at which a strategy does best."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from outlast.theory.roots import least
from outlast.theory.strategies import Job, Outcome, check

SHORTEST_S = 1e-3
LONGEST_S = 1e9
SNAPSHOTS_MAX = 2**20


def tuned(strategy: Callable[[Job], Outcome], job: Job, *, interval_s: float | None = None) -> Job:
    """`job` with the interval, where none is given, at which `strategy` has the most goodput, and,
    where the job takes snapshots at all, with their best number. From 1 ms (or the flush) to 31
    years; numerically, the interval to 1e-6 relative. For `checkpoint_restart` it is
    `intervals.optimum_async`.
    """
    job = replace(job, interval_s=interval_s or max(job.flush_s, SHORTEST_S))
    check(job)

    def fit(one: Job) -> Job:
        return one if interval_s else _with_interval(strategy, one)

    if not job.snapshots:
        return fit(job)
    fitted: dict[int, Job] = {}

    def goodput(snapshots: int) -> float:
        if snapshots not in fitted:
            fitted[snapshots] = fit(replace(job, snapshots=snapshots))
        return strategy(fitted[snapshots]).goodput

    low = high = 1
    while high < SNAPSHOTS_MAX and goodput(2 * high) > goodput(high):
        low, high = high, 2 * high
    high *= 2
    while high - low > 2:
        left, right = low + (high - low) // 3, high - (high - low) // 3
        low, high = (low, right) if goodput(left) >= goodput(right) else (left, high)
    return fitted[max(range(low, high + 1), key=goodput)]


def _with_interval(strategy: Callable[[Job], Outcome], job: Job) -> Job:
    shortest_s = max(job.flush_s, SHORTEST_S)

    def lost(interval_s: float) -> float:
        return -strategy(replace(job, interval_s=interval_s)).goodput

    return replace(job, interval_s=max(shortest_s, least(lost, shortest_s, LONGEST_S)))
