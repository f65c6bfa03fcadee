"""Effective training time ratio: productive time over wall time.

`init_s` (u0) is the time from a start until work continues; failures strike it as well. `queue_s`
(q) is the time in the queue after a failure. Equations are those of Kokolis et al. 2025 (arXiv
2410.21680), whose saves cost nothing; the exact form can include their cost (`cost_s`).
"""

from __future__ import annotations

import math

from outlast.errors import UsageError
from outlast.theory import intervals
from outlast.theory.intervals import efficiency, optimum
from outlast.theory.numerics import broadcasts, check_not_negative, check_positive, find_root

CLOSE = 1e-12  # relative tolerance: an ETTR that was computed is accepted as a target


@broadcasts
def exact(
    interval_s: float,
    mtbf_s: float,
    *,
    init_s: float = 0.0,
    queue_s: float = 0.0,
    cost_s: float = 0.0,
) -> float:
    """Return the ETTR of a long run: [L tau/(e^(L (tau + C)) - 1)] e^(-L u0)/(1 + L q), L = 1/M.
    Exact.

    It is `intervals.efficiency` with R = u0 and D = q, without the first start.
    """
    return efficiency(interval_s, cost_s, mtbf_s, restart_s=init_s, down_s=queue_s)


@broadcasts
def equation_1(
    interval_s: float,
    mtbf_s: float,
    *,
    productive_s: float,
    init_s: float = 0.0,
    queue_s: float = 0.0,
) -> float:
    """Return equations 1 and 7: [1 - L(u0 + tau/2)]/[1 + L(q + (u0/R)(q + u0 + tau/2))], R
    productive seconds. First order (`in_regime`); 0 where the numerator is negative.

    Equations 4 to 6 give another result: the first queue and start, (q + u0)/R, are missing here.
    """
    _check(interval_s, mtbf_s, init_s, queue_s)
    check_positive("productive_s", productive_s)
    lost_s = init_s + interval_s / 2
    slower = (queue_s + init_s / productive_s * (queue_s + lost_s)) / mtbf_s
    return max(0.0, 1 - lost_s / mtbf_s) / (1 + slower)


@broadcasts
def equation_2(interval_s: float, mtbf_s: float, *, init_s: float = 0.0) -> float:
    """Return equations 2 and 8: 1 - L(u0 + tau/2); long runs with short queues. First order
    (`in_regime`); 0 where it would be negative."""
    _check(interval_s, mtbf_s, init_s)
    return max(0.0, 1 - (init_s + interval_s / 2) / mtbf_s)


@broadcasts
def equation_4(
    interval_s: float, mtbf_s: float, *, productive_s: float, init_s: float = 0.0
) -> float:
    """Return expected failures of a run: L(R + u0)/(1 - L(u0 + tau/2)). First order (`in_regime`);
    infinity where a failure costs more than the time between two failures."""
    _check(interval_s, mtbf_s, init_s)
    check_positive("productive_s", productive_s)
    productive = 1 - (init_s + interval_s / 2) / mtbf_s
    return (productive_s + init_s) / mtbf_s / productive if productive > 0 else math.inf


@broadcasts
def equation_6(
    interval_s: float,
    mtbf_s: float,
    *,
    productive_s: float,
    init_s: float = 0.0,
    queue_s: float = 0.0,
) -> float:
    """Return equations 4 to 6: 1/(1 + S), S = [(N + 1)(q + u0) + N tau/2]/R, N of `equation_4`.
    First order (`in_regime`); by Jensen's inequality the mean ETTR is at least this."""
    check_not_negative("queue_s", queue_s)
    failures = equation_4(interval_s, mtbf_s, productive_s=productive_s, init_s=init_s)
    if math.isinf(failures):
        return 0.0
    slower_s = (failures + 1) * (queue_s + init_s) + failures * interval_s / 2
    return 1 / (1 + slower_s / productive_s)


@broadcasts
def in_regime(interval_s: float, mtbf_s: float, *, init_s: float = 0.0) -> bool:
    """Return whether equations 1 to 8 hold: L(u0 + tau/2) is at most 0.3."""
    return intervals.in_regime(init_s + interval_s / 2, mtbf_s)


@broadcasts
def interval_for(
    ettr: float, mtbf_s: float, *, init_s: float = 0.0, queue_s: float = 0.0, cost_s: float = 0.0
) -> float:
    """Return the longest interval, in seconds, at which `exact` is still `ettr`. Infinity without
    failures and with free saves. Raises UsageError with the best possible ETTR."""

    def at(interval_s: float) -> float:
        return exact(interval_s, mtbf_s, init_s=init_s, queue_s=queue_s, cost_s=cost_s)

    if math.isinf(mtbf_s):
        _refuse_above(ettr, 1.0, "with no failure at all")
        return math.inf
    best_s = optimum(cost_s, mtbf_s) or 1e-9 * mtbf_s
    how = f"with a save every {best_s:.4g} s" if cost_s else "saving without end"
    _refuse_above(ettr, at(best_s), how)
    high_s = best_s
    while at(high_s) > ettr:
        high_s *= 2
    if high_s == best_s:
        return best_s
    return find_root(lambda interval_s: at(interval_s) - ettr, best_s, high_s)


@broadcasts
def init_for(
    ettr: float, interval_s: float, mtbf_s: float, *, queue_s: float = 0.0, cost_s: float = 0.0
) -> float:
    """Return the longest start u0, in seconds, with which `exact` is still `ettr`: M ln(ETTR
    without it / `ettr`). Exact. Raises UsageError with the best possible ETTR."""
    best = exact(interval_s, mtbf_s, queue_s=queue_s, cost_s=cost_s)
    _refuse_above(ettr, best, "with an instant start")
    return mtbf_s * math.log(best / ettr) if best > ettr else 0.0


@broadcasts
def mtbf_for(
    ettr: float,
    interval_s: float,
    *,
    init_s: float = 0.0,
    queue_s: float = 0.0,
    cost_s: float = 0.0,
) -> float:
    """Return the shortest mean time between the job's failures, in seconds, at which `exact` is
    still `ettr`; its inverse is the highest failure rate. Raises UsageError with the best possible
    ETTR."""

    def at(mtbf_s: float) -> float:
        return exact(interval_s, mtbf_s, init_s=init_s, queue_s=queue_s, cost_s=cost_s)

    _refuse_above(ettr, at(math.inf), "with no failure at all")
    low_s = high_s = interval_s + init_s + queue_s + cost_s
    while at(high_s) < ettr:
        high_s *= 2
        if math.isinf(high_s):
            return math.inf  # within rounding of the best possible: only without failures
    while at(low_s) >= ettr:
        low_s /= 2
    return find_root(lambda mtbf_s: at(mtbf_s) - ettr, low_s, high_s)


def _refuse_above(ettr: float, best: float, how: str) -> None:
    if not 0 < ettr < 1:
        raise UsageError(f"ettr must lie between 0 and 1, not {ettr!r}")
    if ettr > best * (1 + CLOSE):
        raise UsageError(f"an ETTR of {ettr:g} cannot be reached: the best is {best:.6g}, {how}")


def _check(interval_s: float, mtbf_s: float, init_s: float, queue_s: float = 0.0) -> None:
    check_positive("interval_s", interval_s)
    check_positive("mtbf_s", mtbf_s, endless=True)
    check_not_negative("init_s", init_s)
    check_not_negative("queue_s", queue_s)
