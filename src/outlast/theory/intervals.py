"""Save intervals: the best ones and their cost.

`interval_s` (tau) is work between two saves, without the save itself; a failure loses the work
since the end of the last save. `mtbf_s` (M) is the job's; `math.inf` without failures. Failures are
a Poisson process. A result that no run can reach is infinity (time) or 0 (efficiency).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from outlast.errors import UsageError
from outlast.theory.numerics import (
    broadcasts,
    check_not_negative,
    check_positive,
    check_share,
    one_plus_w0,
)

POINT = 0.01
REGIME_MAX = 0.3  # of time lost to failures; above, first order is wrong by several points


@broadcasts
def young(cost_s: float, mtbf_s: float) -> float:
    """Return the best interval, first order: sqrt(2 C M). Seconds; for C much shorter than M.

    Young 1974 (Comm. ACM 17).
    """
    _check(cost_s, mtbf_s)
    return math.sqrt(2 * cost_s) * math.sqrt(mtbf_s) if cost_s else 0.0


@broadcasts
def daly(cost_s: float, mtbf_s: float) -> float:
    """Return the best interval, as a series: sqrt(2 C M) [1 + sqrt(C/2M)/3 + C/18M] - C; M for C >=
    2M.

    Seconds; to 0.3 % of `optimum` up to C = M/3. Daly 2006 (Future Gen. Comp. Sys. 22), eq. 37.
    """
    _check(cost_s, mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    half = cost_s / (2 * mtbf_s)
    return young(cost_s, mtbf_s) * (1 + math.sqrt(half) / 3 + half / 9) - cost_s


@broadcasts
def optimum(cost_s: float, mtbf_s: float) -> float:
    """Return the best interval, exactly: M [1 + W0(-e^(-1 - C/M))]. Seconds; any C and M.

    It minimises `segment_s` and `segment_safe_restart_s` per second of work, for any R and D.
    Bougeret et al. 2011 (SC '11), the chunk of their theorem 1.
    """
    _check(cost_s, mtbf_s)
    if math.isinf(mtbf_s):
        return math.inf if cost_s else 0.0
    return mtbf_s * one_plus_w0(-math.expm1(-cost_s / mtbf_s))


@broadcasts
def optimum_safe_saves(cost_s: float, mtbf_s: float) -> float:
    """Return the best interval where nothing fails while saving: M [1 + W0((C/M - 1)/e)].

    Seconds; exact, with an instant restart. Epoch AI 2024, appendix A.
    """
    _check(cost_s, mtbf_s)
    if math.isinf(mtbf_s):
        return math.inf if cost_s else 0.0
    return mtbf_s * one_plus_w0(cost_s / mtbf_s)


@broadcasts
def optimum_async(cost_s: float, flush_s: float, mtbf_s: float, *, drag: float = 0.0) -> float:
    """Return the best interval where a save blocks for C and is durable F later, flushed beside
    steps.

    Seconds. `drag` is the share of the flush by which steps slow down, so that a save costs C +
    drag F in total. A flush starts only after the previous one has ended, so the result is at least
    F. The lag until durability costs the same at any interval and does not change the best one
    (`segment_s`). Exact; derived here.
    """
    check_not_negative("flush_s", flush_s)
    check_share("drag", drag)
    return max(flush_s, optimum(cost_s + drag * flush_s, mtbf_s))


@broadcasts
def segment_s(
    interval_s: float,
    cost_s: float,
    mtbf_s: float,
    *,
    flush_s: float = 0.0,
    drag: float = 0.0,
    restart_s: float = 0.0,
    down_s: float = 0.0,
) -> float:
    """Return expected seconds until `interval_s` of work are done and saved; failures strike during
    work, save and restart, not during `down_s`: (M + D) e^(R/M) (e^((tau + C)/M) - 1). Exact.

    Bougeret et al. 2011 (SC '11); Daly 2006's complete cost function is the case D = 0. With a
    flush it is (M + D) e^((R + (1 - drag) F)/M) (e^((tau + C + drag F)/M) - 1), the mean over a
    long run, exact; derived here (docs/theory.md). Then tau must be at least F, else UsageError.
    """
    _check(cost_s, mtbf_s, interval_s, restart_s, down_s)
    _check_flush(interval_s, flush_s, drag)
    save_s = cost_s + drag * flush_s
    if math.isinf(mtbf_s):
        return interval_s + save_s
    again = (mtbf_s + down_s) * _exp((restart_s + (1 - drag) * flush_s) / mtbf_s)
    return again * _expm1((interval_s + save_s) / mtbf_s)


@broadcasts
def recovery_s(restart_s: float, mtbf_s: float, *, down_s: float = 0.0) -> float:
    """Return expected seconds from a failure until the job works again: (M + D) e^(R/M) - M. Exact.

    Failures during the restart begin it again, after `down_s` each. The result is the factor (M +
    D) e^(R/M) of `segment_s`, less the work before the failure.
    """
    _check(0.0, mtbf_s, 1.0, restart_s, down_s)
    if math.isinf(mtbf_s):
        return restart_s + down_s
    waits_s = down_s * _exp(restart_s / mtbf_s) if down_s else 0.0
    return mtbf_s * _expm1(restart_s / mtbf_s) + waits_s


@broadcasts
def segment_safe_restart_s(
    interval_s: float, cost_s: float, mtbf_s: float, *, restart_s: float = 0.0, down_s: float = 0.0
) -> float:
    """Return `segment_s` without failures during a restart: (M + D + R)(e^((tau + C)/M) - 1).
    Exact.

    The same derivation with R counted as downtime.
    """
    _check(cost_s, mtbf_s, interval_s, restart_s, down_s)
    if math.isinf(mtbf_s):
        return interval_s + cost_s
    return (mtbf_s + down_s + restart_s) * _expm1((interval_s + cost_s) / mtbf_s)


@broadcasts
def segment_safe_saves_s(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Return expected seconds without failures during saves and with instant restarts: M (e^(tau/M)
    - 1) + C. Exact. Epoch AI 2024, appendix A."""
    _check(cost_s, mtbf_s, interval_s)
    if math.isinf(mtbf_s):
        return interval_s + cost_s
    return mtbf_s * _expm1(interval_s / mtbf_s) + cost_s


@broadcasts
def efficiency(
    interval_s: float,
    cost_s: float,
    mtbf_s: float,
    *,
    flush_s: float = 0.0,
    drag: float = 0.0,
    restart_s: float = 0.0,
    down_s: float = 0.0,
) -> float:
    """Return the share of time spent on lasting work, 0 to 1: tau / `segment_s`. Exact."""
    check_positive("interval_s", interval_s)
    segment = segment_s(
        interval_s, cost_s, mtbf_s, flush_s=flush_s, drag=drag, restart_s=restart_s, down_s=down_s
    )
    return interval_s / segment if segment else 1.0  # so short that both are 0 after rounding


@broadcasts
def waste(
    interval_s: float,
    cost_s: float,
    mtbf_s: float,
    *,
    flush_s: float = 0.0,
    drag: float = 0.0,
    restart_s: float = 0.0,
    down_s: float = 0.0,
) -> float:
    """Return the share of time that is lost, first order: (C + drag F)/tau + (tau/2 + F + R + D)/M.

    May exceed 1 outside its regime (see `in_regime`). Without F: Young 1974. With F: derived here;
    a failure during the flush falls back to the save before, so F adds to the redone work. For
    asynchronous saves tau must be at least F, else UsageError.
    """
    _check(cost_s, mtbf_s, interval_s, restart_s, down_s)
    _check_flush(interval_s, flush_s, drag)
    saving = (cost_s + drag * flush_s) / interval_s
    return saving + (interval_s / 2 + flush_s + restart_s + down_s) / mtbf_s


@broadcasts
def in_regime(lost_a_failure_s: float, mtbf_s: float) -> bool:
    """Return whether first order holds: a failure costs (tau/2 + F + R + D) at most 0.3 M."""
    return lost_a_failure_s <= REGIME_MAX * mtbf_s


class Zone(NamedTuple):
    """Range of intervals, in seconds, whose waste is close to the minimum."""

    low_s: float
    high_s: float


def flat_zone(lost: Callable[[float], float], best_s: float, points: float = POINT) -> Zone:
    """Return the range of intervals at which `lost` is at most `points` (default 0.01) above its
    minimum.

    `lost` is a waste, with its minimum at `best_s`, and rises on either side. `low_s` is 0 and
    `high_s` infinity if that side never rises so far. To 1e-9 relative.
    """
    check_positive("best_s", best_s)
    check_positive("points", points)
    limit = lost(best_s) + points
    return Zone(_edge(lost, best_s, limit, 0.5), _edge(lost, best_s, limit, 2.0))


def _edge(lost: Callable[[float], float], inside: float, limit: float, factor: float) -> float:
    outside = inside * factor
    while lost(outside) <= limit:
        inside = outside
        outside = outside * factor
        if not 1e-12 < outside < 1e15:
            return 0.0 if factor < 1 else math.inf
    while abs(outside - inside) > 1e-9 * inside:
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if lost(middle) <= limit else (inside, middle)
    return inside


def _exp(exponent: float) -> float:
    return math.exp(exponent) if exponent < 700 else math.inf


def _expm1(exponent: float) -> float:
    return math.expm1(exponent) if exponent < 700 else math.inf


def _check(
    cost_s: float,
    mtbf_s: float,
    interval_s: float = 1.0,
    restart_s: float = 0.0,
    down_s: float = 0.0,
) -> None:
    check_not_negative("cost_s", cost_s)
    check_positive("mtbf_s", mtbf_s, endless=True)
    check_positive("interval_s", interval_s)
    check_not_negative("restart_s", restart_s)
    check_not_negative("down_s", down_s)


def _check_flush(interval_s: float, flush_s: float, drag: float) -> None:
    check_not_negative("flush_s", flush_s)
    check_share("drag", drag)
    if interval_s < flush_s:
        raise UsageError(
            f"interval_s ({interval_s!r}) is below flush_s ({flush_s!r}): a save begins when the"
            " last one is durable"
        )
