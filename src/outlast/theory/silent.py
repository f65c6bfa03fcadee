"""Errors that nothing reports: each interval of work is verified before it is saved.

Silent errors strike work alone, at rate 1/M_s, and are found by a verification of V seconds that
misses none; failures of the other sort (M) strike work, verification, save and restart. Either
sends the job back to the last save.
"""

from __future__ import annotations

import math

from outlast.theory.arrays import broadcasts
from outlast.theory.checks import not_negative, positive
from outlast.theory.intervals import recovery_s
from outlast.theory.roots import least


@broadcasts
def segment_s(
    interval_s: float,
    verify_s: float,
    cost_s: float,
    silent_mtbf_s: float,
    *,
    mtbf_s: float = math.inf,
    restart_s: float = 0.0,
    down_s: float = 0.0,
) -> float:
    """Expected seconds until `interval_s` of work are done, found right, and saved. Exact.

    G(W + V) e^(W/M_s + C/M) + G(C) + Y (e^(W/M_s + (W + V + C)/M) - 1), where G(x) = M (e^(x/M) -
    1) and Y is `recovery_s`. Without other failures: e^(W/M_s)(W + V) + (e^(W/M_s) - 1) R + C.
    Model of Benoit et al. 2016 (ACM Trans. Par. Comp. 3); this form is derived here.
    """
    positive("interval_s", interval_s)
    _check(verify_s, cost_s, silent_mtbf_s, mtbf_s)
    wrong = interval_s / silent_mtbf_s
    checked_s = interval_s + verify_s
    again = wrong + (checked_s + cost_s) / mtbf_s
    if again > 700:
        return math.inf
    working_s = _grown(checked_s, mtbf_s) * math.exp(wrong + cost_s / mtbf_s)
    recovering_s = recovery_s(restart_s, mtbf_s, down_s=down_s) * math.expm1(again)
    return working_s + _grown(cost_s, mtbf_s) + recovering_s


@broadcasts
def first_order(
    verify_s: float, cost_s: float, silent_mtbf_s: float, *, mtbf_s: float = math.inf
) -> float:
    """The best interval, first order: sqrt((V + C)/(1/M_s + 1/(2 M))). Seconds; for V and C much
    shorter than both. Benoit et al. 2016 (ACM Trans. Par. Comp. 3)."""
    _check(verify_s, cost_s, silent_mtbf_s, mtbf_s)
    rate = 1 / silent_mtbf_s + 0.5 / mtbf_s
    if not rate:
        return math.inf if verify_s + cost_s else 0.0
    return math.sqrt((verify_s + cost_s) / rate)


@broadcasts
def optimum(
    verify_s: float,
    cost_s: float,
    silent_mtbf_s: float,
    *,
    mtbf_s: float = math.inf,
    restart_s: float = 0.0,
    down_s: float = 0.0,
) -> float:
    """The best interval: what minimises `segment_s` per second of work, found numerically.

    Seconds, to 1e-6 relative. Unlike the optimum without silent errors it depends on R.
    """
    guess_s = first_order(verify_s, cost_s, silent_mtbf_s, mtbf_s=mtbf_s)
    if guess_s == 0 or math.isinf(guess_s):
        return guess_s
    mean_s = 1 / (1 / silent_mtbf_s + 1 / mtbf_s)

    def slowdown(interval_s: float) -> float:
        spent_s = segment_s(
            interval_s, verify_s, cost_s, silent_mtbf_s,
            mtbf_s=mtbf_s, restart_s=restart_s, down_s=down_s,
        )  # fmt: skip
        return spent_s / interval_s

    return least(slowdown, min(guess_s, mean_s) * 1e-3, max(guess_s, mean_s) * 10)


def _grown(length_s: float, mtbf_s: float) -> float:
    return length_s if math.isinf(mtbf_s) else mtbf_s * math.expm1(length_s / mtbf_s)


def _check(verify_s: float, cost_s: float, silent_mtbf_s: float, mtbf_s: float) -> None:
    not_negative("verify_s", verify_s)
    not_negative("cost_s", cost_s)
    positive("silent_mtbf_s", silent_mtbf_s, endless=True)
    positive("mtbf_s", mtbf_s, endless=True)
