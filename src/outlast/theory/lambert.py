"""The Lambert W function, in the one form that save intervals need."""

from __future__ import annotations

import math

from outlast.theory.checks import not_negative

SMALL = 0.5  # below, (u - 1) e^u + 1 is summed from its series: the closed form cancels
CLOSE = 1e-6  # a step of this relative size leaves an error of its cube (Halley)
STEPS_MAX = 64


def one_plus_w0(p: float) -> float:
    """u = 1 + W0((p - 1)/e) for p >= 0: the root u >= 0 of (u - 1) e^u + 1 = p. Dimensionless.

    Both optimal intervals have this form, and near the branch point (p -> 0, saves much shorter
    than the time between failures) W0 itself would lose half of its digits where u loses none.
    Accurate to 1e-14 relative. Start: the series at the branch point and at infinity of Corless et
    al. 1996 (Adv. Comput. Math. 5), section 4; then Halley's iteration.
    """
    not_negative("p", p)
    if p == 0:
        return 0.0
    u = _start(p)
    for _ in range(STEPS_MAX):
        miss = _excess(u) - p
        step = miss / (u * math.exp(u) - miss * (u + 1) / (2 * u))
        u -= step
        if abs(step) <= CLOSE * u:
            return u
    raise ArithmeticError(f"1 + W0(({p!r} - 1)/e) did not converge")


def _start(p: float) -> float:
    if p < 1:
        d = math.sqrt(2 * p)
        return d * (1 - d / 3 + 11 * d * d / 72)
    near = math.log1p((p - 1) / math.e)
    return 1 + (near if near < 1 else near - math.log(near))


def _excess(u: float) -> float:
    """(u - 1) e^u + 1, which is u^2/2 + u^3/3 + u^4/8 + ... = sum of (k - 1)/k! u^k."""
    if u >= SMALL:
        return (u - 1) * math.exp(u) + 1
    total, power = 0.0, u  # u^(k - 1)/(k - 1)!
    for k in range(2, 24):
        power_next = power * u / k
        total += (k - 1) * power_next
        power = power_next
    return total
