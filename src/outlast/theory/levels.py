"""Multi-level saves: memory, local disk, durable storage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from outlast.errors import UsageError
from outlast.theory.intervals import optimum_async, waste
from outlast.theory.numerics import (
    broadcasts,
    check_not_negative,
    check_positive,
    check_share,
)

EXPONENT_MAX = 700.0  # e^709 is the largest float
LEVELS_MAX = 8  # all choices of levels are compared, 2 ** (LEVELS_MAX - 1)


class Level(NamedTuple):
    """One kind of save. `cost_s`: time it blocks beyond shallower saves of the same moment.

    `survives`: the share of failures after which a save of this level or of a shallower one can be
    restored. `drag`: the share of `flush_s` by which steps slow down meanwhile.
    """

    name: str
    cost_s: float
    survives: float
    flush_s: float = 0.0
    restore_s: float = 0.0
    drag: float = 0.0


class Chosen(NamedTuple):
    """A level that pays: work between its saves, and the failures that it is restored after."""

    level: Level
    interval_s: float
    mtbf_s: float  # of those failures alone; infinity where a shallower level covers them all


class Pattern(NamedTuple):
    """The levels that pay, shallowest first, and the share of time lost with them (first order)."""

    chosen: tuple[Chosen, ...]
    waste: float


def pattern(levels: Sequence[Level], mtbf_s: float, *, down_s: float = 0.0) -> Pattern:
    """Return the best intervals of `levels`, shallowest first, without levels that do not pay.

    Each failure is restored from the shallowest chosen level that survives it. Level k thus has
    failures of its own at the rate lambda_k = lambda (survives_k - survives_(k-1)). Its interval is
    `optimum_async` of that rate; a deeper level's interval is never below a shallower one's. Waste:
    the sum over k of (C_k + drag_k F_k)/tau_k + lambda_k (tau_k/2 + F_k + R_k + D).

    First order in the interplay of levels, exact for a single level. Benoit et al. 2017 (IEEE
    Trans. Comp. 66), W_k = sqrt(2 C_k/lambda_k); the choice of levels compares all subsets.
    Failures that the deepest level does not survive restart the job from its beginning at any
    interval, and are not counted.
    """
    check_positive("mtbf_s", mtbf_s, endless=True)
    check_not_negative("down_s", down_s)
    _check(levels)
    *upper, deepest = levels
    kinds = itertools.product((True, False), repeat=len(upper))
    choices = [[*itertools.compress(upper, kept), deepest] for kept in kinds]
    return min((_spread(kept, mtbf_s, down_s) for kept in choices), key=lambda option: option.waste)


@broadcasts
def nested_s(
    interval_s: float,
    cost_s: float,
    deep_cost_s: float,
    mtbf_s: float,
    deep_mtbf_s: float,
    *,
    saves: int = 1,
) -> float:
    """Return expected seconds from one deep save to the end of the next, where failures cost work
    only. Exact.

    In between: `saves` times `interval_s` of work and a shallow save (C), then a deep save (C2). A
    shallow failure (`mtbf_s`) goes back to the last save of either level, a deep one
    (`deep_mtbf_s`) to the last deep save; both strike during work and saves. With l, l2 and G(L) =
    (e^((l + l2) L) - 1)/(l + l2): [(1 + l2 G(tau + C))^n (1 + l2 G(C2)) - 1]/l2. Derived here
    (docs/theory.md); `pattern` is its first order, with n not rounded.
    """
    check_positive("interval_s", interval_s)
    check_not_negative("cost_s", cost_s)
    check_not_negative("deep_cost_s", deep_cost_s)
    check_positive("mtbf_s", mtbf_s, endless=True)
    check_positive("deep_mtbf_s", deep_mtbf_s, endless=True)
    check_positive("saves", saves)
    return unchecked_nested_s(interval_s, cost_s, deep_cost_s, mtbf_s, deep_mtbf_s, saves)


def unchecked_nested_s(
    interval_s: float,
    cost_s: float,
    deep_cost_s: float,
    mtbf_s: float,
    deep_mtbf_s: float,
    saves: int,
) -> float:
    """Return `nested_s` of numbers that are in its domain: tuning an interval calls it often."""
    deep_rate = 1 / deep_mtbf_s
    rate = 1 / mtbf_s + deep_rate
    chunk_s = completion_s(interval_s + cost_s, rate)
    save_s = completion_s(deep_cost_s, rate)
    if not deep_rate or math.isinf(chunk_s + save_s):
        return saves * chunk_s + save_s
    grows = saves * math.log1p(deep_rate * chunk_s) + math.log1p(deep_rate * save_s)
    return completion_s(grows / deep_rate, deep_rate)


def completion_s(length_s: float, rate_per_s: float) -> float:
    """Return expected seconds until `length_s` pass without a failure: (e^(l L) - 1)/l. Exact;
    infinity above the range of floats."""
    exponent = length_s * rate_per_s
    if exponent > EXPONENT_MAX:
        return math.inf
    return math.expm1(exponent) / rate_per_s if rate_per_s else length_s


def _spread(levels: Sequence[Level], mtbf_s: float, down_s: float) -> Pattern:
    chosen: list[Chosen] = []
    lost = 0.0
    covered = 0.0
    interval_s = 0.0
    for level in levels:
        own = level.survives - covered
        own_mtbf_s = mtbf_s / own if own > 0 else math.inf
        best_s = optimum_async(level.cost_s, level.flush_s, own_mtbf_s, drag=level.drag)
        interval_s = max(interval_s, best_s)
        covered = level.survives
        chosen.append(Chosen(level, interval_s, own_mtbf_s))
        lost += _lost(level, interval_s, own_mtbf_s, down_s)
    return Pattern(tuple(chosen), lost)


def _lost(level: Level, interval_s: float, mtbf_s: float, down_s: float) -> float:
    if math.isinf(interval_s):
        return 0.0 if math.isinf(mtbf_s) else math.inf  # never saved: any failure loses all work
    if interval_s == 0:
        return (level.restore_s + down_s) / mtbf_s  # saved all the time, without need
    return waste(
        interval_s,
        level.cost_s,
        mtbf_s,
        flush_s=level.flush_s,
        drag=level.drag,
        restart_s=level.restore_s,
        down_s=down_s,
    )


def _check(levels: Sequence[Level]) -> None:
    if not 1 <= len(levels) <= LEVELS_MAX:
        raise UsageError(f"from 1 to {LEVELS_MAX} levels can be compared, not {len(levels)}")
    covered = 0.0
    for level in levels:
        check_not_negative(f"{level.name}: cost_s", level.cost_s)
        check_not_negative(f"{level.name}: flush_s", level.flush_s)
        check_not_negative(f"{level.name}: restore_s", level.restore_s)
        check_share(f"{level.name}: survives", level.survives)
        check_share(f"{level.name}: drag", level.drag)
        if level.survives < covered:
            raise UsageError(
                f"{level.name} survives {level.survives:g} of failures, the level above it"
                f" {covered:g}: list levels shallowest first, each with the share that it"
                " or a level above it survives"
            )
        covered = level.survives
