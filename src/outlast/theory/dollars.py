"""Cost of a run in dollars, and its sensitivity to each parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from outlast.errors import UsageError
from outlast.theory.argument_checks import broadcasts, check_not_negative, check_positive

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
    """Return dollars: all GPUs, spares included, for the wall time; what is stored meanwhile; what
    leaves. A month is 730 hours, a GB 10^9 bytes. Infinity where the run never ends."""
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
    """Return the derivatives of `function(**at)` by each parameter that is given, by name; none of
    them may be a count that has to be whole.

    Central differences of the function itself, 1e-4 relative; one-sided at 0, where a negative
    parameter would be refused, with a step of 1e-4. Raises UsageError where the result is not
    finite.
    """
    value = function(**at)
    if not math.isfinite(value):
        raise UsageError(f"nothing follows from a result of {value!r}")
    found: dict[str, Sensitivity] = {}
    for name, here in at.items():
        low, high = (here * (1 - STEP), here * (1 + STEP)) if here else (0.0, STEP)
        rise = function(**{**at, name: high}) - function(**{**at, name: low})
        slope = rise / (high - low)
        found[name] = Sensitivity(slope, slope * here / value if value else math.nan)
    return found
