"""Number of spares for nodes that fail one by one and return from repair.

`in_repair` is the mean number in repair, rate x repair time (`in_repair`); with unlimited crew the
number is Poisson distributed for any law of repair times (Palm 1943: M/G/infinity), in the long
run. Bursts that take several nodes at once are in `bursts.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from outlast.errors import UsageError
from outlast.theory import special_functions
from outlast.theory.argument_checks import (
    broadcasts,
    check_not_negative,
    check_positive,
    check_whole,
)

MEAN_MAX = 1e7


@broadcasts
def in_repair(rate_per_s: float, repair_s: float) -> float:
    """Return mean number of nodes in repair: failures a second times mean seconds of repair. Exact
    for any laws (Little 1961)."""
    check_not_negative("rate_per_s", rate_per_s)
    check_not_negative("repair_s", repair_s)
    return rate_per_s * repair_s


@broadcasts
def short_share(spares: int, in_repair: float) -> float:
    """Return the share of time with more nodes in repair than there are spares: P(N > s). Exact
    where failures go on meanwhile, as when a job runs on without what is missing."""
    _check(spares, in_repair)
    return special_functions.poisson_above(spares, in_repair)


@broadcasts
def wait_share(spares: int, in_repair: float) -> float:
    """Return the share of failures that find no spare: P(N >= s). Exact, as `short_share` (Poisson
    arrivals see time averages, Wolff 1982)."""
    _check(spares, in_repair)
    return special_functions.poisson_above(spares - 1, in_repair)


@broadcasts
def stalled_share(spares: int, in_repair: float) -> float:
    """Return the share of time in which a job that needs all its nodes waits for a repair: Erlang's
    B of s + 1 places. Exact for any law of repair times, where nothing fails while the job waits.

    `in_repair` is still rate x repair time, at the rate of a job that works.
    """
    _check(spares, in_repair)
    return special_functions.erlang_b(spares + 1, in_repair)


@broadcasts
def shortage(spares: int, in_repair: float) -> float:
    """Return mean number of nodes missing, E[max(0, N - s)] = m P(N >= s) - s P(N > s). Exact, as
    `short_share`."""
    _check(spares, in_repair)
    above = special_functions.poisson_above(spares, in_repair)
    return max(
        0.0, in_repair * special_functions.poisson_above(spares - 1, in_repair) - spares * above
    )


@broadcasts
def quantile(probability: float, in_repair: float) -> int:
    """Return the fewest spares that suffice with this probability: the least s with P(N <= s) at
    least it. Exact, as `short_share`. The mean itself is short half of the time."""
    if not 0 < probability < 1:
        raise UsageError(f"probability must lie between 0 and 1, not {probability!r}")
    _check(0, in_repair)
    return _first(
        lambda spares: special_functions.poisson_above(spares, in_repair) <= 1 - probability
    )


@broadcasts
def stalling_cost(
    spares: int, in_repair: float, job_nodes: int, *, spare_price: float = 1.0
) -> float:
    """Return the cost of spares and of waiting for repairs, in prices of a working node.

    s x `spare_price` + `job_nodes` x `stalled_share`. Exact for a job that needs all its nodes.

    `spare_price`: a spare's price over a working node's; less than 1 where spares earn something.
    """
    check_positive("job_nodes", job_nodes)
    check_positive("spare_price", spare_price)
    return spares * spare_price + job_nodes * stalled_share(spares, in_repair)


@broadcasts
def best_stalling(in_repair: float, job_nodes: int, *, spare_price: float = 1.0) -> int:
    """Return the number of spares at which `stalling_cost` is least: one more would save less than
    it costs. Exact; Erlang's B is convex in the number of places (Messerli 1972)."""
    stalling_cost(0, in_repair, job_nodes, spare_price=spare_price)  # checks

    def enough(spares: int) -> bool:
        now, then = (
            special_functions.erlang_b(spares + 1, in_repair),
            special_functions.erlang_b(spares + 2, in_repair),
        )
        return job_nodes * (now - then) <= spare_price

    return _first(enough)


@broadcasts
def best_degraded(in_repair: float, idle_nodes: float, *, spare_price: float = 1.0) -> int:
    """Return the number of spares at which s x `spare_price` + `idle_nodes` x `shortage` is least,
    for a job that runs on while each missing node idles `idle_nodes` (a replica's): the least s
    with P(N > s) <= price/idle. Exact (newsvendor, Arrow et al. 1951)."""
    _check(0, in_repair)
    check_positive("idle_nodes", idle_nodes)
    check_positive("spare_price", spare_price)
    return _first(
        lambda spares: (
            special_functions.poisson_above(spares, in_repair) <= spare_price / idle_nodes
        )
    )


def _first(enough: Callable[[int], bool]) -> int:
    """Return the least number from 0 on that is enough; every larger one is."""
    if enough(0):
        return 0
    low, high = 0, 1
    while not enough(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _check(spares: int, in_repair: float) -> None:
    check_whole("spares", spares)
    check_not_negative("in_repair", in_repair)
    if in_repair > MEAN_MAX:
        raise UsageError(f"in_repair must be at most {MEAN_MAX:g}, not {in_repair!r}")
