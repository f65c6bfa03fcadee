"""Number of spares for nodes that fail one by one, or several at once.

`in_repair` is the mean number in repair, rate x repair time (`in_repair`). With unlimited repair
crews the number is Poisson distributed for any distribution of repair times (Palm 1943:
M/G/infinity), in the long run. `repair_distribution` covers bursts that take several nodes at once.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import math
from collections.abc import Callable, Sequence

from outlast.errors import UsageError
from outlast.theory import numerics
from outlast.theory.failures import FailureKind, rate_per_s
from outlast.theory.numerics import (
    broadcasts,
    check_not_negative,
    check_positive,
    check_whole,
)

MEAN_MAX = 1e7


@broadcasts
def in_repair(rate_per_s: float, repair_s: float) -> float:
    """Return the mean number of nodes in repair: failures per second times mean seconds of repair.
    Exact for any distributions (Little 1961)."""
    check_not_negative("rate_per_s", rate_per_s)
    check_not_negative("repair_s", repair_s)
    return rate_per_s * repair_s


@broadcasts
def short_share(spares: int, in_repair: float) -> float:
    """Return the share of time with more nodes in repair than there are spares: P(N > s). Exact if
    failures continue meanwhile, as in a job that continues without the missing nodes."""
    _check(spares, in_repair)
    return numerics.poisson_above(spares, in_repair)


@broadcasts
def wait_share(spares: int, in_repair: float) -> float:
    """Return the share of failures that find no spare: P(N >= s). Exact, as `short_share` (Poisson
    arrivals see time averages, Wolff 1982)."""
    _check(spares, in_repair)
    return numerics.poisson_above(spares - 1, in_repair)


@broadcasts
def stalled_share(spares: int, in_repair: float) -> float:
    """Return the share of time in which a job that needs all its nodes waits for a repair.

    Erlang's B of s + 1 places. Exact for any distribution of repair times, if nothing fails while
    the job waits. `in_repair` is rate x repair time, at the rate of a job that works.
    """
    _check(spares, in_repair)
    return numerics.erlang_b(spares + 1, in_repair)


@broadcasts
def shortage(spares: int, in_repair: float) -> float:
    """Return mean number of nodes missing, E[max(0, N - s)] = m P(N >= s) - s P(N > s). Exact, as
    `short_share`."""
    _check(spares, in_repair)
    above = numerics.poisson_above(spares, in_repair)
    return max(0.0, in_repair * numerics.poisson_above(spares - 1, in_repair) - spares * above)


@broadcasts
def quantile(probability: float, in_repair: float) -> int:
    """Return the fewest spares that suffice with this probability: the least s for which P(N <= s)
    reaches it. Exact, as `short_share`. A number of spares equal to the mean is short half of the
    time."""
    if not 0 < probability < 1:
        raise UsageError(f"probability must lie between 0 and 1, not {probability!r}")
    _check(0, in_repair)
    return _first(lambda spares: numerics.poisson_above(spares, in_repair) <= 1 - probability)


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
    """Return the number of spares with the least `stalling_cost`: one more would save less than it
    costs. Exact; Erlang's B is convex in the number of places (Messerli 1972)."""
    stalling_cost(0, in_repair, job_nodes, spare_price=spare_price)  # checks

    def enough(spares: int) -> bool:
        now = numerics.erlang_b(spares + 1, in_repair)
        then = numerics.erlang_b(spares + 2, in_repair)
        return job_nodes * (now - then) <= spare_price

    return _first(enough)


@broadcasts
def best_degraded(in_repair: float, idle_nodes: float, *, spare_price: float = 1.0) -> int:
    """Return the number of spares with the least s x `spare_price` + `idle_nodes` x `shortage`. For
    a job that continues while each missing node idles `idle_nodes` (a replica's): the least s with
    P(N > s) <= price/idle. Exact (newsvendor, Arrow et al. 1951)."""
    _check(0, in_repair)
    check_positive("idle_nodes", idle_nodes)
    check_positive("spare_price", spare_price)
    return _first(
        lambda spares: numerics.poisson_above(spares, in_repair) <= spare_price / idle_nodes
    )


def _first(enough: Callable[[int], bool]) -> int:
    """Return the least sufficient number from 0 on; every larger number is sufficient."""
    if enough(0):
        return 0
    low = 0
    high = 1
    while not enough(high):
        low = high
        high = high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _check(spares: int, in_repair: float) -> None:
    check_whole("spares", spares)
    check_not_negative("in_repair", in_repair)
    if in_repair > MEAN_MAX:
        raise UsageError(f"in_repair must be at most {MEAN_MAX:g}, not {in_repair!r}")


TAIL = 1e-18
LARGE = 1e200
COUNT_MAX = 2_000_000


class InRepair:
    """Distribution of the number of nodes in repair. Its tail below 1e-15 counts as 0."""

    def __init__(self, points: Sequence[float]) -> None:
        """Take the probabilities (`points`) of 0, 1, 2, ... nodes."""
        tails = list(itertools.accumulate(reversed(points)))
        self._above = [*tails[-2::-1], 0.0]  # P(N > s), summed from the small end
        self.mean = math.fsum(count * point for count, point in enumerate(points))
        self.points = tuple(points)

    def short_share(self, spares: int) -> float:
        """Return P(N > s): the share of time with more nodes in repair than there are spares."""
        check_whole("spares", spares)
        return self._above[int(spares)] if spares < len(self._above) else 0.0

    def quantile(self, probability: float) -> int:
        """Return the fewest spares that suffice with this probability."""
        if not 0 < probability < 1:
            raise UsageError(f"probability must lie between 0 and 1, not {probability!r}")
        return bisect.bisect_left(self._above, probability - 1, key=lambda above: -above)

    def shortage(self, spares: int) -> float:
        """Return the mean number of nodes missing, E[max(0, N - s)]: sum of P(N > k), k >= s."""
        check_whole("spares", spares)
        return math.fsum(self._above[int(spares) :])

    def best_degraded(self, idle_nodes: float, *, spare_price: float = 1.0) -> int:
        """Return the number of spares at which s x `spare_price` + `idle_nodes` x `shortage` is
        least."""
        check_positive("idle_nodes", idle_nodes)
        check_positive("spare_price", spare_price)
        return bisect.bisect_left(self._above, -spare_price / idle_nodes, key=lambda above: -above)


def repair_distribution(kinds: Sequence[FailureKind], repair_s: float) -> InRepair:
    """Return the distribution of nodes in repair, each burst for `repair_s` on the average. Exact.

    Panjer's recursion (1981): n p(n) = sum over kinds of k m_k p(n - k), p(0) = e^(-sum of m_k),
    where a burst of kind k takes k nodes and m_k bursts are in repair on the average.
    """
    check_not_negative("repair_s", repair_s)
    rate_per_s(kinds)  # checks
    loads = [(one.devices_killed, one.rate_per_s * repair_s) for one in kinds if one.devices_killed]
    mean = math.fsum(size * load for size, load in loads)
    if mean > COUNT_MAX / 2:
        raise UsageError(f"{mean:.4g} nodes in repair on the average: at most {COUNT_MAX // 2:g}")
    return InRepair(_panjer([(size, size * load) for size, load in loads if load], mean))


class StalledShares:
    """Waiting of a job that needs all its nodes, where nothing fails while it waits.

    Each node returns on its own after an exponential time; exact then, in the long run.
    """

    def __init__(self, kinds: Sequence[FailureKind], repair_s: float, spares_max: int) -> None:
        """Compute the shares for up to `spares_max` spares."""
        check_not_negative("repair_s", repair_s)
        check_whole("spares_max", spares_max)
        rate_per_s(kinds)  # checks
        taking = [kind for kind in kinds if kind.devices_killed and kind.rate_per_s]
        self._loads = [(kind.devices_killed, kind.rate_per_s * repair_s) for kind in taking]
        self._reach = max((size for size, _ in self._loads), default=0)
        self._log_below = [0.0]  # ln P(N <= n)/P(N = 0)
        for n in range(1, int(spares_max) + 1):
            self._log_below.append(self._log_below[-1] + math.log1p(self._point(n, n - 1)))

    def share(self, spares: int) -> float:
        """Return the share of time with more missing nodes than there are spares."""
        check_whole("spares", spares)
        away = range(int(spares) + 1, int(spares) + self._reach + 1)
        above = math.fsum(self._point(n, int(spares)) for n in away)
        return above / (1 + above)

    def _point(self, n: int, working: int) -> float:
        """Return p(n)/P(N <= working); nothing fails while more than `working` nodes are away."""
        below = self._log_below
        return math.fsum(
            load * (-math.expm1(below[n - size - 1] - below[working]) if n > size else 1.0) / n
            for size, load in self._loads
            if n - size <= working
        )


def _panjer(terms: Sequence[tuple[int, float]], mean: float) -> list[float]:
    """Return p(0), p(1), ... up to negligible terms; a term is a burst's size and size x load."""
    reach = max((size for size, _ in terms), default=1)
    log_scale = -math.fsum(weight / size for size, weight in terms)
    recent = collections.deque([1.0], maxlen=reach)
    points = [math.exp(log_scale)]
    small = 0
    while terms and small < reach:
        n = len(points)
        value = math.fsum(weight * recent[-size] for size, weight in terms if size <= n) / n
        recent.append(value)
        points.append(math.exp(log_scale + math.log(value)) if value else 0.0)
        if value > LARGE:
            recent = collections.deque((value / LARGE for value in recent), maxlen=reach)
            log_scale += math.log(LARGE)
        small = small + 1 if n > mean and points[-1] < TAIL else 0
    return points
