"""Spare nodes against references and simulation."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import UsageError
from outlast.theory import numerics, spares
from outlast.theory.failures import FailureKind

DAY_S = 86400.0


def points(mean: float, count: int) -> list[float]:
    return [math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count)]


@pytest.mark.parametrize("mean", [0.01, 0.7, 6.0, 480.0])
def test_against_the_sum(mean: float) -> None:
    """Every quantity is a sum over Poisson's probabilities, which here is summed."""
    count = int(mean + 20 * math.sqrt(mean) + 40)
    p = points(mean, count)
    for s in {0, 1, int(mean), int(mean + 3 * math.sqrt(mean)) + 1}:
        assert spares.short_share(s, mean) == pytest.approx(math.fsum(p[s + 1 :]), rel=1e-9)
        assert spares.wait_share(s, mean) == pytest.approx(math.fsum(p[s:]), rel=1e-9)
        short = math.fsum((k - s) * one for k, one in enumerate(p) if k > s)
        assert spares.shortage(s, mean) == pytest.approx(short, rel=1e-7)
        stalled = p[s + 1] / math.fsum(p[: s + 2])
        assert spares.stalled_share(s, mean) == pytest.approx(stalled, rel=1e-9)
    for probability in (0.5, 0.9, 0.999):
        s = spares.quantile(probability, mean)
        assert math.fsum(p[: s + 1]) >= probability > math.fsum(p[:s])


def test_a_hundred_thousand_in_repair() -> None:
    """mpmath's sums, and Erlang's recursion: 1e-9 even there."""
    mpmath = pytest.importorskip("mpmath", reason="the reference")
    mean = 1e5
    for s in (100_000, 101_000, 101_900):
        with mpmath.workdps(30):
            true = mpmath.gammainc(s + 1, 0, mean, regularized=True)
        assert spares.short_share(s, mean) == pytest.approx(float(true), rel=1e-9)
    blocked = 1.0
    for servers in range(1, 100_302):
        blocked = mean * blocked / (servers + mean * blocked)
    assert spares.stalled_share(100_300, mean) == pytest.approx(blocked, rel=1e-9)
    assert spares.stalled_share(0, mean) == pytest.approx(mean / (1 + mean))
    assert spares.quantile(0.999, mean) == 100_979


def test_the_mean_is_short_half_of_the_time() -> None:
    """480 spares for 20 failures an hour and a day of repair: said to suffice, as 0.3 % of 125,000
    nodes. They are the mean, and 0.384 %."""
    mean = spares.in_repair(20 / 3600, DAY_S)
    assert mean == pytest.approx(480)
    assert 480 / 125_000 == 0.00384
    assert spares.short_share(480, mean) == pytest.approx(0.488, abs=0.001)
    assert spares.wait_share(480, mean) == pytest.approx(0.506, abs=0.001)
    assert spares.quantile(0.999, mean) == 549
    assert spares.best_stalling(mean, 125_000) == 555


def stalled(spare_nodes: int, repair: Callable[[], float], draw: random.Random) -> list[float]:
    """Shares of time waited, in 40 parts of 500 failures each, one a second while it works."""
    shares, now, back = [], 0.0, []
    for _ in range(40):
        begun, waited = now, 0.0
        for _ in range(500):
            now += draw.expovariate(1.0)
            heapq.heappush(back, now + repair())
            while back[0] <= now:
                heapq.heappop(back)
            if len(back) > spare_nodes:
                waited += back[0] - now
                now = heapq.heappop(back)
        shares.append(waited / (now - begun))
    return shares


@pytest.mark.parametrize("law", ["exponential", "always"])
@pytest.mark.parametrize("spare_nodes", [0, 3, 9])
def test_stalls_as_simulated(law: str, spare_nodes: int) -> None:
    """Whatever the law of repairs: Erlang's B of s + 1 places, of 6 in repair on the average."""
    draw = random.Random(8)
    repair = (lambda: draw.expovariate(1 / 6)) if law == "exponential" else (lambda: 6.0)
    shares = stalled(spare_nodes, repair, draw)[2:]
    mean = math.fsum(shares) / len(shares)
    error = math.sqrt(math.fsum((one - mean) ** 2 for one in shares)) / len(shares)
    assert abs(mean - spares.stalled_share(spare_nodes, 6.0)) < 4 * error
    assert error < 0.1 * mean


@given(st.floats(0.01, 200), st.integers(2, 5000), st.floats(0.05, 2))
def test_the_best_number_is_best(mean: float, nodes: int, price: float) -> None:
    best = spares.best_stalling(mean, nodes, spare_price=price)
    least = spares.stalling_cost(best, mean, nodes, spare_price=price)
    for other in range(max(0, best - 3), best + 4):
        cost = spares.stalling_cost(other, mean, nodes, spare_price=price)
        assert cost >= least * (1 - 1e-9)
    best = spares.best_degraded(mean, nodes, spare_price=price)
    least = best * price + nodes * spares.shortage(best, mean)
    for other in range(max(0, best - 3), best + 4):
        assert other * price + nodes * spares.shortage(other, mean) >= least * (1 - 1e-9)


@pytest.mark.parametrize("mean", [0.5, 6.0, 480.0, 2000.0])
def test_bursts_of_one_stall_as_erlang_has_it(mean: float) -> None:
    stalling = spares.StalledShares(
        [FailureKind(name="node", rate_per_unit_s=mean)], 1.0, int(2 * mean) + 9
    )
    for s in (0, 1, int(mean), int(mean + 3 * math.sqrt(mean))):
        assert stalling.share(s) == pytest.approx(spares.stalled_share(s, mean), rel=1e-7)


def test_bursts_of_all_stall_as_one_node_would() -> None:
    """A job of one rack without spares is away until the last of its two nodes is back: after 3/2
    repairs on the average."""
    stalling = spares.StalledShares(
        [FailureKind(name="rack", rate_per_unit_s=0.2, devices_killed=2)], 1.0, 0
    )
    assert stalling.share(0) == pytest.approx(0.3 / 1.3)


def test_nothing_in_repair() -> None:
    assert (
        spares.StalledShares([FailureKind(name="none", rate_per_unit_s=0.0)], 1.0, 3).share(2) == 0
    )
    assert spares.short_share(0, 0.0) == spares.wait_share(1, 0.0) == 0
    assert spares.wait_share(0, 0.0) == 1  # who has no spare finds none
    assert spares.stalled_share(0, 0.0) == spares.shortage(0, 0.0) == 0
    assert spares.quantile(0.999, 0.0) == spares.best_stalling(0.0, 100) == 0


def burst_points(loads: list[tuple[int, float]], count: int) -> list[float]:
    """The convolution of each kind's own distribution."""
    total = [1.0] + [0.0] * (count - 1)
    for size, load in loads:
        one = [0.0] * count
        for k, p in enumerate(points(load, count)):
            if k * size < count:
                one[k * size] = p
        total = [
            math.fsum(total[k - j] * one[j] for j in range(0, k + 1, size)) for k in range(count)
        ]
    return total


def test_bursts_are_convolutions() -> None:
    found = spares.repair_distribution(
        [
            FailureKind(name="node", rate_per_unit_s=3e-4, units=10),
            FailureKind(name="rack", rate_per_unit_s=2e-4, devices_killed=9),
            FailureKind(name="software", rate_per_unit_s=1.0, devices_killed=0),
        ],
        1000.0,
    )
    assert found.points[:120] == pytest.approx(burst_points([(1, 3.0), (9, 0.2)], 120), abs=1e-13)
    assert math.fsum(found.points) == pytest.approx(1, abs=1e-12)
    assert found.mean == pytest.approx(3 + 9 * 0.2)
    s = found.quantile(0.99)
    assert found.short_share(s) <= 0.01 < found.short_share(s - 1)
    assert s > spares.quantile(0.99, found.mean)  # as if each failed alone
    short = math.fsum((k - 5) * p for k, p in enumerate(found.points) if k > 5)
    assert found.shortage(5) == pytest.approx(short)
    best = found.best_degraded(10.0)
    costs = [k + 10 * found.shortage(k) for k in range(60)]
    assert costs[best] == min(costs)


@pytest.mark.parametrize("mean", [0.5, 480.0, 5000.0])
def test_bursts_of_one_are_poisson(mean: float) -> None:
    """Far beyond the range of floats: e^-5000 is the first probability."""
    found = spares.repair_distribution([FailureKind(name="node", rate_per_unit_s=mean)], 1.0)
    assert found.quantile(0.999) == spares.quantile(0.999, mean)
    s = int(mean * 1.02) + 1
    assert found.short_share(s) == pytest.approx(spares.short_share(s, mean), rel=1e-8)
    assert found.shortage(s) == pytest.approx(spares.shortage(s, mean), rel=1e-7)
    assert found.short_share(len(found.points)) == 0


def test_bursts_that_leave_gaps() -> None:
    found = spares.repair_distribution(
        [FailureKind(name="rack", rate_per_unit_s=2.0, devices_killed=4)], 1.0
    )
    assert found.points[:12:4] == pytest.approx(points(2.0, 3))
    assert not any(p for k, p in enumerate(found.points) if k % 4)
    empty = spares.repair_distribution([FailureKind(name="none", rate_per_unit_s=0.0)], 1.0)
    assert empty.points == (1.0,) and empty.quantile(0.999) == 0 and empty.shortage(0) == 0


def test_the_tails_meet() -> None:
    for mean, s in itertools.product((0.3, 50.0, 3000.0), (0, 40, 3000)):
        both = numerics.poisson_above(s, mean) + numerics.poisson_at_most(s, mean)
        assert both == pytest.approx(1, abs=1e-10)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: spares.short_share(-1, 3.0), "spares must be 0 or above"),
        (lambda: spares.short_share(1.5, 3.0), "spares must be a whole number, not 1.5"),
        (lambda: spares.InRepair([0.5, 0.5]).short_share(-1), "spares must be 0 or above"),
        (lambda: spares.InRepair([0.5, 0.5]).best_degraded(0), "idle_nodes must be above 0"),
        (lambda: spares.short_share(1, 1e8), "in_repair must be at most 1e"),
        (lambda: spares.quantile(1.0, 3.0), "probability must lie between 0 and 1"),
        (lambda: spares.best_stalling(3.0, 0), "job_nodes must be above 0"),
        (lambda: spares.best_degraded(3.0, 1, spare_price=0), "spare_price must be above 0"),
        (
            lambda: spares.repair_distribution([FailureKind(name="n", rate_per_unit_s=1.0)], 1e9),
            "1e.09 nodes in repair",
        ),
    ],
)
def test_impossible_input(call: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        call()
