"""Losses besides failures (silent errors, planned stops, preemption, stragglers), and dollars.

Silent errors strike only work, at rate 1/M_s. A verification of V seconds finds all of them. Other
failures (M) strike work, verification, save and restart. Both send the job back to the last save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from outlast.errors import UsageError
from outlast.theory.intervals import recovery_s
from outlast.theory.numerics import (
    broadcasts,
    check_not_negative,
    check_positive,
    check_share,
    find_minimum,
)
from outlast.theory.strategies import Rung


@broadcasts
def verified_segment_s(
    interval_s: float,
    verify_s: float,
    cost_s: float,
    silent_mtbf_s: float,
    *,
    mtbf_s: float = math.inf,
    restart_s: float = 0.0,
    down_s: float = 0.0,
) -> float:
    """Return expected seconds until `interval_s` of work are done, verified and saved. Exact.

    G(W + V) e^(W/M_s + C/M) + G(C) + Y (e^(W/M_s + (W + V + C)/M) - 1), where G(x) = M (e^(x/M) -
    1) and Y is `recovery_s`. Without other failures: e^(W/M_s)(W + V) + (e^(W/M_s) - 1) R + C.
    Model of Benoit et al. 2016 (ACM Trans. Par. Comp. 3); this form is derived here.
    """
    check_positive("interval_s", interval_s)
    _check_silent(verify_s, cost_s, silent_mtbf_s, mtbf_s)
    wrong = interval_s / silent_mtbf_s
    checked_s = interval_s + verify_s
    again = wrong + (checked_s + cost_s) / mtbf_s
    if again > 700:
        return math.inf
    working_s = _grown(checked_s, mtbf_s) * math.exp(wrong + cost_s / mtbf_s)
    recovering_s = recovery_s(restart_s, mtbf_s, down_s=down_s) * math.expm1(again)
    return working_s + _grown(cost_s, mtbf_s) + recovering_s


@broadcasts
def first_order_verified_interval(
    verify_s: float, cost_s: float, silent_mtbf_s: float, *, mtbf_s: float = math.inf
) -> float:
    """Return the best interval, first order: sqrt((V + C)/(1/M_s + 1/(2 M))). Seconds; for V and C
    much shorter than both. Benoit et al. 2016 (ACM Trans. Par. Comp. 3)."""
    _check_silent(verify_s, cost_s, silent_mtbf_s, mtbf_s)
    rate = 1 / silent_mtbf_s + 0.5 / mtbf_s
    if not rate:
        return math.inf if verify_s + cost_s else 0.0
    return math.sqrt((verify_s + cost_s) / rate)


@broadcasts
def best_verified_interval(
    verify_s: float,
    cost_s: float,
    silent_mtbf_s: float,
    *,
    mtbf_s: float = math.inf,
    restart_s: float = 0.0,
    down_s: float = 0.0,
) -> float:
    """Return the best interval, which minimises `segment_s` per second of work, found numerically.

    Seconds, to 1e-6 relative. Unlike the optimum without silent errors it depends on R.
    """
    guess_s = first_order_verified_interval(verify_s, cost_s, silent_mtbf_s, mtbf_s=mtbf_s)
    if guess_s == 0 or math.isinf(guess_s):
        return guess_s
    mean_s = 1 / (1 / silent_mtbf_s + 1 / mtbf_s)

    def slowdown(interval_s: float) -> float:
        spent_s = verified_segment_s(
            interval_s,
            verify_s,
            cost_s,
            silent_mtbf_s,
            mtbf_s=mtbf_s,
            restart_s=restart_s,
            down_s=down_s,
        )
        return spent_s / interval_s

    return find_minimum(slowdown, min(guess_s, mean_s) * 1e-3, max(guess_s, mean_s) * 10)


def _grown(length_s: float, mtbf_s: float) -> float:
    return length_s if math.isinf(mtbf_s) else mtbf_s * math.expm1(length_s / mtbf_s)


def _check_silent(verify_s: float, cost_s: float, silent_mtbf_s: float, mtbf_s: float) -> None:
    check_not_negative("verify_s", verify_s)
    check_not_negative("cost_s", cost_s)
    check_positive("silent_mtbf_s", silent_mtbf_s, endless=True)
    check_positive("mtbf_s", mtbf_s, endless=True)


@broadcasts
def maintenance_share(
    period_s: float,
    length_s: float,
    *,
    save_s: float = 0.0,
    restart_s: float = 0.0,
    mtbf_s: float = math.inf,
) -> float:
    """Return the share of time that planned stops take: (C + S + Y)/(P + C + S + Y), P between
    stops.

    The job saves, pauses for `length_s`, and restarts; failures strike the restart (Y is
    `recovery_s`). Exact for stops right after a save. Goodput of other losses multiplies with the
    rest, to first order, since the stop's save replaces a regular one.
    """
    check_positive("period_s", period_s)
    check_not_negative("length_s", length_s)
    check_not_negative("save_s", save_s)
    stop_s = save_s + length_s + recovery_s(restart_s, mtbf_s)
    return 1.0 if math.isinf(stop_s) else stop_s / (period_s + stop_s)


@broadcasts
def preemption_s(
    notice_s: float,
    save_s: float,
    interval_s: float,
    *,
    restart_s: float = 0.0,
    queue_s: float = 0.0,
) -> float:
    """Return expected seconds that one preemption costs: C + R + q if the notice is long enough for
    a save, else tau/2 + R + q. First order: tau much shorter than the time between failures."""
    check_positive("interval_s", interval_s)
    for name, value in (("notice_s", notice_s), ("save_s", save_s), ("restart_s", restart_s)):
        check_not_negative(name, value)
    check_not_negative("queue_s", queue_s)
    lost_s = save_s if notice_s >= save_s else interval_s / 2
    return lost_s + restart_s + queue_s


def preemption(
    share: float, notice_s: float, save_s: float, *, restart_s: float = 0.0, queue_s: float = 0.0
) -> Rung:
    """Return the rung of `strategies.ladder` for preemptions, which are this `share` of all
    failures. With enough notice only the time of the save is lost. No node goes into repair."""
    in_time = notice_s >= save_s
    return Rung(
        name="preemption",
        share=share,
        recover_s=restart_s + (save_s if in_time else 0.0),
        loses="nothing" if in_time else "checkpoint",
        wait_s=queue_s,
        takes_node=False,
    )


CELLS = 400  # Simpson's rule over the normal density; 1e-9 of the maximum's mean
# The maximum of up to 1e20 values lies between these.
LOW = -8.5
HIGH = 12.0
WORKERS_MAX = 1e20


@broadcasts
def any_slow(probability: float, workers: int) -> float:
    """Return the probability that at least one of `workers` is slow in a step: 1 - (1 - p)^N. Exact
    for workers that are slow independently of each other."""
    check_share("probability", probability)
    check_positive("workers", workers)
    return -math.expm1(workers * math.log1p(-probability)) if probability < 1 else 1.0


@broadcasts
def step_slowdown(probability: float, workers: int, factor: float) -> float:
    """Return the mean step time over that without stragglers: 1 + (factor - 1) `any_slow`. Exact. A
    slow worker takes `factor` times as long."""
    if not 1 <= factor < math.inf:
        raise UsageError(f"factor must be 1 or above and finite, not {factor!r}")
    return 1 + (factor - 1) * any_slow(probability, workers)


@broadcasts
def slowest_s(mean_s: float, deviation_s: float, workers: int) -> float:
    """Return mean seconds of the slowest of `workers` with normally distributed step times: mean +
    deviation x E[max of N]. By quadrature, to 1e-8 of the deviation; never above
    `slowest_at_most_s`."""
    check_positive("mean_s", mean_s)
    check_not_negative("deviation_s", deviation_s)
    if not 1 <= workers <= WORKERS_MAX:
        raise UsageError(f"workers must be from 1 to {WORKERS_MAX:g}, not {workers!r}")
    return mean_s + deviation_s * _highest(workers)


@broadcasts
def slowest_at_most_s(mean_s: float, deviation_s: float, workers: int) -> float:
    """Return the usual estimate, mean + deviation x sqrt(2 ln N). It is an upper bound, approached
    slowly (15 % too much of the deviation's part at a thousand workers)."""
    check_positive("mean_s", mean_s)
    check_not_negative("deviation_s", deviation_s)
    check_positive("workers", workers)
    return mean_s + deviation_s * math.sqrt(2 * math.log(workers))


def _highest(workers: float) -> float:
    """Return E[max] = HIGH - integral of Phi(x)^N up to HIGH."""
    step = (HIGH - LOW) / CELLS
    total = 0.0
    for k in range(CELLS + 1):
        weight = 1 if k in {0, CELLS} else 4 if k % 2 else 2
        total += weight * _below(LOW + k * step) ** workers
    return HIGH - total * step / 3


def _below(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


HOUR_S = 3600.0
MONTH_S = 730 * HOUR_S
GB = 1e9
STEP = 1e-4  # relative; central differences are then right to about 1e-8


@broadcasts
def wall_s(work_s: float, goodput: float) -> float:
    """Return mean seconds until `work_s` of useful work are done: W over goodput; infinity where no
    run ends. Exact in the long run."""
    check_not_negative("work_s", work_s)
    if not 0 <= goodput <= 1:
        raise UsageError(f"goodput is a share, from 0 to 1, not {goodput!r}")
    return work_s / goodput if goodput else math.inf


@broadcasts
def cost_usd(
    gpus: float,
    wall_s: float,
    usd_per_gpu_hour: float,
    *,
    spare_gpus: float = 0.0,
    stored_bytes: float = 0.0,
    usd_per_gb_month: float = 0.0,
    moved_bytes: float = 0.0,
    usd_per_gb_moved: float = 0.0,
) -> float:
    """Return the cost in dollars: all GPUs, spares included, for the wall time; storage during it;
    egress. A month is 730 hours, a GB 10^9 bytes. Infinity where the run never ends."""
    check_positive("wall_s", wall_s, endless=True)
    if not gpus + spare_gpus >= 1:
        raise UsageError(f"gpus must be 1 or above, not {gpus!r}")
    check_not_negative("spare_gpus", spare_gpus)
    check_not_negative("usd_per_gpu_hour", usd_per_gpu_hour)
    renting = (gpus + spare_gpus) * usd_per_gpu_hour / HOUR_S
    storing = stored_bytes / GB * usd_per_gb_month / MONTH_S
    return (renting + storing) * wall_s + moved_bytes / GB * usd_per_gb_moved


class Sensitivity(NamedTuple):
    """Dependence of a result on one parameter.

    `slope`: result per unit. `elasticity`: per cent of the result for one per cent of the
    parameter; 0 where the parameter is 0.
    """

    slope: float
    elasticity: float


def sensitivities(
    function: Callable[..., float], at: Mapping[str, float]
) -> dict[str, Sensitivity]:
    """Return the derivatives of `function(**at)` by each given parameter, by name; parameters must
    not be whole-number counts.

    Central differences of the function itself, 1e-4 relative; one-sided at 0 with a step of 1e-4,
    since negative parameters are invalid. Raises UsageError where the result is not finite.
    """
    value = function(**at)
    if not math.isfinite(value):
        raise UsageError(f"nothing follows from a result of {value!r}")
    by_name: dict[str, Sensitivity] = {}
    for name, here in at.items():
        low, high = (here * (1 - STEP), here * (1 + STEP)) if here else (0.0, STEP)
        rise = function(**{**at, name: high}) - function(**{**at, name: low})
        slope = rise / (high - low)
        by_name[name] = Sensitivity(slope, slope * here / value if value else math.nan)
    return by_name
