"""Losses without a replica, by planned stops and slow workers, and their cost."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from outlast.errors import UsageError
from outlast.theory import costs
from outlast.theory.intervals import optimum
from outlast.theory.replicas import drop_and_regrow, replicas_present
from outlast.theory.strategies import RecoveryJob, Rung, checkpoint_restart, ladder


def simulated(
    replicas: int, mtbf_s: float, repair_s: float, drop_s: float, return_s: float, seed: int
) -> list[tuple[float, float]]:
    """Work done at full speed, and time passed, in 40 parts; repairs are exponential."""
    draw = random.Random(seed)
    present, now, quiet_s = replicas, 0.0, 0.0
    parts: list[tuple[float, float]] = []
    for _ in range(40):
        begun_s, worked_s = now, 0.0
        for _ in range(500):
            rate = present / (mtbf_s * replicas)
            total = rate + (replicas - present) / repair_s
            then = now + draw.expovariate(total)
            worked_s += max(0.0, then - max(now, quiet_s)) * present / replicas
            drops = draw.random() * total < rate
            present += -1 if drops else 1
            now = then
            quiet_s = max(quiet_s, now + (drop_s if drops else return_s))
        parts.append((worked_s, now - begun_s))
    return parts


@pytest.mark.parametrize(
    ("replicas", "repair_s", "detect_s", "pause_s"),
    [(8, 300, 1, 2), (8, 50, 20, 30), (2, 100, 0, 50), (30, 1000, 5, 5)],
)
def test_dropping_as_simulated(
    replicas: int, repair_s: float, detect_s: float, pause_s: float
) -> None:
    """M = 100 s, so that pauses overlap."""
    job = RecoveryJob(mtbf_s=100, interval_s=50, detect_s=detect_s, repair_s=repair_s)
    found = drop_and_regrow(job, replicas, pause_s)
    assert found.exact and found.save == found.redo == 0
    told = simulated(replicas, 100, repair_s, detect_s + pause_s, pause_s, 6)[2:]
    off = [worked_s - found.goodput * passed_s for worked_s, passed_s in told]
    error = math.sqrt(math.fsum(one**2 for one in off)) / len(off)
    assert abs(math.fsum(off) / len(off)) < 4 * error
    assert error < 0.05 * math.fsum(passed_s for _, passed_s in told) / len(told)


def test_replicas_in_repair() -> None:
    """Without pauses it is one over one and the failures in a repair: 0.803 for replicas of 512
    GPUs of 50,000 h, a day of repair."""
    present = replicas_present(50_000 * 3600 / 512, 86400)
    assert present == pytest.approx(0.803, abs=0.0005)
    job = RecoveryJob(mtbf_s=50_000 * 3600 / 16_384, interval_s=600, repair_s=86400)
    assert drop_and_regrow(job, 32, 0.0).goodput == pytest.approx(present)
    assert drop_and_regrow(replace(job, repair_s=0), 32, 0.0).goodput == pytest.approx(1)


def test_a_share_falls_back() -> None:
    """All of them: checkpoint and restart. None: no restart. Between: first order, and it sums."""
    job = RecoveryJob(mtbf_s=1e4, interval_s=600, cost_s=5, detect_s=20, repair_s=3000)
    whole = drop_and_regrow(job, 8, 30, 300, 1.0)
    assert whole.goodput == pytest.approx(checkpoint_restart(job, 300).goodput)
    found = drop_and_regrow(job, 8, 30, 300, 0.2, slower=0.1)
    told = [
        found.goodput, found.save, found.redo, found.detect, found.recover, found.wait,
        found.degraded,
    ]  # fmt: skip
    assert math.fsum(told) == pytest.approx(1) and min(told) >= 0
    assert not found.exact and found.in_regime
    assert math.fsum(found.recover_by_rung.values()) == pytest.approx(found.detect + found.recover)
    assert found.goodput < drop_and_regrow(job, 8, 30, 300, 0.2).goodput
    with pytest.raises(UsageError, match="spares must be None"):
        drop_and_regrow(replace(job, spares=3), 8, 30)
    with pytest.raises(UsageError, match="replicas must be above 0"):
        drop_and_regrow(job, 0, 30)


def test_planned_stops() -> None:
    """47 in 54 days, half an hour each: 1.8 %."""
    lost = costs.maintenance_share(54 * 86400 / 47 - 1800, 1800)
    assert lost == pytest.approx(47 * 1800 / (54 * 86400))
    more = costs.maintenance_share(9e4, 600, save_s=60, restart_s=300, mtbf_s=1e3)
    stop_s = 660 + 1e3 * math.expm1(0.3)
    assert more == pytest.approx(stop_s / (9e4 + stop_s))
    assert costs.maintenance_share(9e4, 600, restart_s=1e6, mtbf_s=1.0) == 1


def test_preemption() -> None:
    assert costs.preemption_s(120, 30, 600, restart_s=60, queue_s=300) == 390
    assert costs.preemption_s(10, 30, 600, restart_s=60, queue_s=300) == 660
    job = RecoveryJob(mtbf_s=1e5, interval_s=600, cost_s=30)
    rest = Rung(name="restart", share=0.5, recover_s=60, loses="checkpoint")
    told = costs.preemption(0.5, 120, 30, restart_s=60, queue_s=300)
    blind = costs.preemption(0.5, 10, 30, restart_s=60, queue_s=300)
    gain = ladder(job, [told, rest]).goodput - ladder(job, [blind, rest]).goodput
    per_failure_s = 600 / 2 - 30 + 30 / 2  # a failure finds half an interval and half a save
    assert gain == pytest.approx(0.5 / 1e5 * per_failure_s, rel=0.1)


def test_stragglers() -> None:
    assert costs.any_slow(1e-4, 16_384) == pytest.approx(0.806, abs=0.0005)
    assert costs.any_slow(0.0, 10) == 0 and costs.any_slow(1.0, 10) == 1
    assert costs.step_slowdown(1e-4, 16_384, 1.5) == pytest.approx(1.403, abs=0.0005)
    with pytest.raises(UsageError, match="factor must be 1 or above"):
        costs.step_slowdown(0.1, 10, 0.5)
    with pytest.raises(UsageError, match="workers must be from 1"):
        costs.slowest_s(1, 0.1, 0)


def test_the_slowest_of_many() -> None:
    """Known: 1/sqrt(pi), 3/(2 sqrt(pi)); and drawn, for a hundred."""
    assert costs.slowest_s(1.0, 1.0, 1) == pytest.approx(1, abs=1e-8)
    assert costs.slowest_s(1.0, 1.0, 2) == pytest.approx(1 + 1 / math.sqrt(math.pi), abs=1e-8)
    three = 1 + 1.5 / math.sqrt(math.pi)
    assert costs.slowest_s(1.0, 1.0, 3) == pytest.approx(three, abs=1e-8)
    draw = random.Random(1)
    told = [max(draw.gauss(5, 2) for _ in range(100)) for _ in range(1000)]
    error = statistics.stdev(told) / math.sqrt(len(told))
    assert abs(statistics.fmean(told) - costs.slowest_s(5, 2, 100)) < 4 * error
    for workers, above in ((2, 2.087), (1000, 1.147), (10**7, 1.071)):
        bound = costs.slowest_at_most_s(1, 1, workers) - 1
        assert bound / (costs.slowest_s(1, 1, workers) - 1) == pytest.approx(above, abs=2e-3)


def test_dollars_of_a_run() -> None:
    """8,000 GPUs for 30 days at 2.50: 14.4 million; and 1,203 failures of 15 minutes 6 million."""
    assert costs.cost_usd(8000, 30 * 86400, 2.5) == pytest.approx(14.4e6)
    assert costs.cost_usd(8000, 1203 * 900, 2.5) == pytest.approx(6.015e6)
    stored = costs.cost_usd(
        1, costs.MONTH_S, 0.0, stored_bytes=5e12, usd_per_gb_month=0.02, moved_bytes=1e12,
        usd_per_gb_moved=0.05,
    )  # fmt: skip
    assert stored == pytest.approx(5000 * 0.02 + 1000 * 0.05)
    assert costs.wall_s(90, 0.9) == pytest.approx(100)
    assert costs.wall_s(90, 0.0) == costs.cost_usd(8, math.inf, 2.0) == math.inf
    with pytest.raises(UsageError, match="goodput is a share"):
        costs.wall_s(90, -0.5)


@given(st.floats(0.1, 10), st.floats(-3, 3))
def test_derivatives_of_a_power(x: float, power: float) -> None:
    found = costs.sensitivities(lambda x, rest: 7 * x**power + rest, {"x": x, "rest": 0.0})
    assert found["x"].elasticity == pytest.approx(power, abs=1e-6)
    assert found["x"].slope == pytest.approx(7 * power * x ** (power - 1), rel=1e-6, abs=1e-6)
    assert found["rest"].elasticity == 0 and found["rest"].slope == pytest.approx(1, rel=1e-3)


def test_sensitivity_to_the_interval_vanishes_at_its_optimum() -> None:
    """At the optimum the interval does not matter, restarts do."""

    def usd(mtbf_s: float, interval_s: float, restart_s: float) -> float:
        found = checkpoint_restart(
            RecoveryJob(mtbf_s=mtbf_s, interval_s=interval_s, cost_s=5), restart_s
        )
        return costs.cost_usd(1e4, costs.wall_s(1e6, found.goodput), 2.0)

    at = {"mtbf_s": 1e4, "interval_s": optimum(5, 1e4), "restart_s": 300.0}
    found = costs.sensitivities(usd, at)
    assert found["interval_s"].elasticity == pytest.approx(0, abs=1e-6)
    assert found["restart_s"].elasticity == pytest.approx(300 / 1e4, rel=1e-4)
    assert found["mtbf_s"].elasticity < -0.03
    with pytest.raises(UsageError, match="nothing follows from a result of inf"):
        costs.sensitivities(usd, {**at, "mtbf_s": 1e-3})
