"""Spares where one failure takes several nodes: rack, power feed, switch.

Bursts of each kind come as a Poisson process. Where the nodes of a burst return together, the
number in repair is compound Poisson: exact for any law of repair times, in the long run. A job that
waits for nodes is another matter: nothing fails meanwhile (`Stalling`).
"""

from __future__ import annotations

import bisect
import collections
import itertools
import math
from collections.abc import Sequence

from outlast.errors import UsageError
from outlast.theory.argument_checks import check_not_negative, check_positive, check_whole
from outlast.theory.failures import FailureKind, rate_per_s

TAIL = 1e-18
LARGE = 1e200
COUNT_MAX = 2_000_000


class InRepair:
    """The distribution of the number of nodes in repair. What lies beyond the last 1e-15
    counts as never."""

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


def in_repair(kinds: Sequence[FailureKind], repair_s: float) -> InRepair:
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


class Stalling:
    """Waiting of a job that needs all its nodes, where nothing fails while it waits.

    Each node returns on its own after an exponential time; exact then, in the long run.
    """

    def __init__(self, kinds: Sequence[FailureKind], repair_s: float, spares_max: int) -> None:
        """Compute the shares for up to `spares_max` spares."""
        check_not_negative("repair_s", repair_s)
        check_whole("spares_max", spares_max)
        rate_per_s(kinds)  # checks
        taking = [one for one in kinds if one.devices_killed and one.rate_per_s]
        self._loads = [(one.devices_killed, one.rate_per_s * repair_s) for one in taking]
        self._reach = max((size for size, _ in self._loads), default=0)
        self._log_below = [0.0]  # ln P(N <= n)/P(N = 0)
        for n in range(1, int(spares_max) + 1):
            self._log_below.append(self._log_below[-1] + math.log1p(self._point(n, n - 1)))

    def share(self, spares: int) -> float:
        """Return the share of time in which more nodes are away than there are spares."""
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
    points, small = [math.exp(log_scale)], 0
    while terms and small < reach:
        n = len(points)
        value = math.fsum(weight * recent[-size] for size, weight in terms if size <= n) / n
        recent.append(value)
        points.append(math.exp(log_scale + math.log(value)) if value else 0.0)
        if value > LARGE:
            recent = collections.deque((one / LARGE for one in recent), maxlen=reach)
            log_scale += math.log(LARGE)
        small = small + 1 if n > mean and points[-1] < TAIL else 0
    return points
