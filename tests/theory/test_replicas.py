"""Replicas in memory, and limits of job size."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import UsageError
from outlast.theory import replicas
from outlast.theory.failures import DAY_S, HOUR_S
from outlast.theory.intervals import efficiency, optimum

NODE = 1 / (8000 * HOUR_S)
GPU_MTBF_S = 50_000 * HOUR_S


@pytest.mark.parametrize(("members", "window_s"), [(2, 20.0), (3, 60.0), (2, 100.0)])
def test_losses_as_simulated(members: int, window_s: float) -> None:
    """One group whose nodes fail every 100 s: until the first loss, whole again after each
    window."""
    draw = random.Random(4)
    told = []
    for _ in range(4_000):
        spent_s = 0.0
        while True:
            spent_s += draw.expovariate(members / 100)
            others_s = max(draw.expovariate(1 / 100) for _ in range(members - 1))
            if others_s < window_s:
                break
            spent_s += window_s
        told.append(spent_s + others_s)
    mean = math.fsum(told) / len(told)
    error = math.sqrt(math.fsum((one - mean) ** 2 for one in told)) / len(told)
    rate = replicas.loss_rate_per_s(members, members, 1 / 100, window_s)
    assert abs(mean - 1 / rate) < 4 * error
    assert error < 0.03 * mean


@pytest.mark.parametrize("members", [2, 3, 4])
def test_losses_in_short_windows(members: int) -> None:
    """groups x M l (l w)^(M-1)."""
    rate = replicas.loss_rate_per_s(1200, members, 1e-6, 10.0)
    assert rate == pytest.approx(1200 / members * members * 1e-6 * 1e-5 ** (members - 1), rel=1e-4)


def test_more_copies_and_shorter_windows_lose_less() -> None:
    rates = [replicas.loss_rate_per_s(120, members, NODE, 300.0) for members in (1, 2, 3, 4)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(120 * NODE)  # no copy at all
    assert replicas.loss_rate_per_s(120, 2, NODE, 0.0) == 0
    assert replicas.loss_rate_per_s(120, 2, NODE, 600.0) > rates[1]


def test_the_formula_of_epoch() -> None:
    """1,000 GPUs, 60 days, 10 s: it says one loss in 533 and in 2.3e9 runs; its own formula gives
    32,000 and 1.38e11. What it leaves out, a window of 5 minutes on 125 nodes, gives 4,267."""
    two = replicas.epoch_losses(60 * DAY_S, 10, 1000, 2, NODE)
    three = replicas.epoch_losses(60 * DAY_S, 10, 1000, 3, NODE)
    assert 1 / two == pytest.approx(32_000)
    assert 1 / three == pytest.approx(1.38e11, rel=0.002)
    assert 1 / two / 533 == pytest.approx(60, abs=0.1)
    run = 60 * DAY_S * replicas.loss_rate_per_s(125, 2, NODE, 300.0)
    assert 1 / run == pytest.approx(4267, abs=1)


def test_memory_and_network_of_copies() -> None:
    """Llama 3: 4,860 GB over 16,384 GPUs; two copies, two versions of each at once."""
    state = 405e9 * 12
    assert replicas.memory_per_gpu_bytes(state, 16_384, 1) == pytest.approx(297e6, rel=0.002)
    assert replicas.memory_per_gpu_bytes(state, 16_384, 2, versions=2) == pytest.approx(
        4 * state / 16_384
    )
    assert replicas.network_per_gpu_bytes_per_s(state, 16_384, 1, 10.0) == pytest.approx(
        29.7e6, 0.01
    )
    assert replicas.save_s(state, 1, 2e12) == pytest.approx(2.43)


def test_limits_of_storage() -> None:
    """70 million GPUs is where the best efficiency is 1/e; it is half at 27.8 million, and at
    344,000 once the 311 s of recovery count."""
    assert replicas.gpus_at(1 / math.e, GPU_MTBF_S, 2.5, safe_saves=True) == pytest.approx(72e6)
    assert replicas.gpus_at(0.5, GPU_MTBF_S, 2.5, safe_saves=True) == pytest.approx(
        27.8e6, rel=1e-3
    )
    assert replicas.gpus_at(0.5, GPU_MTBF_S, 2.43, restart_s=311) == pytest.approx(344e3, rel=2e-3)
    assert replicas.gpus_at(0.5, GPU_MTBF_S, 2.5) == pytest.approx(13.9e6, rel=1e-3)


def test_limits_of_memory() -> None:
    """562 million, not counting recovery; and with 54 days, not a second, for Chinchilla's models:
    1.8e15 and 43 million instead of 9e21 and 94e9."""
    assert replicas.gpus_at(1 / math.e, GPU_MTBF_S, 0.32, safe_saves=True) == pytest.approx(562.5e6)
    assert replicas.gpus_at(0.5, GPU_MTBF_S, 0.32, restart_s=10) == pytest.approx(10e6, rel=0.1)

    def limit(train_s: float, exponent: float) -> float:
        def save_s(gpus: float) -> float:
            state = 12 * replicas.chinchilla_parameters(gpus, 989e12, 0.5, train_s)
            return replicas.save_s(state, gpus, 50e9, copies=4, network_exponent=exponent)

        return replicas.gpus_at(1 / math.e, GPU_MTBF_S, save_s, safe_saves=True)

    assert limit(1.0, 1.0) == pytest.approx(9e21, rel=0.06)
    assert limit(1.0, 0.5) == pytest.approx(94e9, rel=0.02)
    assert limit(54 * DAY_S, 1.0) == pytest.approx(1.8e15, rel=0.02)
    assert limit(54 * DAY_S, 0.5) == pytest.approx(43e6, rel=0.01)


def test_a_model_of_llamas_size() -> None:
    """16,384 GPUs, 54 days, 41 %: 508 billion parameters, a little more than were trained."""
    found = replicas.chinchilla_parameters(16_384, 989e12, 0.41, 54 * DAY_S)
    assert found == pytest.approx(508e9, rel=0.002)


@given(st.floats(0.01, 1e3), st.floats(1e2, 1e7), st.floats(0, 1e3))
def test_the_best_efficiency_is_that_of_the_optimum(
    cost_s: float, mtbf_s: float, restart_s: float
) -> None:
    best = replicas.best_efficiency(cost_s, mtbf_s, restart_s=restart_s)
    at = efficiency(optimum(cost_s, mtbf_s), cost_s, mtbf_s, restart_s=restart_s)
    assert best == pytest.approx(at, rel=1e-9)
    assert replicas.best_efficiency(cost_s, mtbf_s, restart_s=restart_s, safe_saves=True) >= best


def test_safe_saves_and_restarts_that_fail() -> None:
    """M e^(R/M)(e^(tau/M) - 1) + C per tau, at its least."""
    for cost_s, restart_s in ((5.0, 0.0), (30.0, 50.0), (200.0, 300.0)):

        def slower(tau_s: float, cost_s: float = cost_s, restart_s: float = restart_s) -> float:
            works_s = 100 * math.exp(restart_s / 100) * math.expm1(tau_s / 100)
            return (works_s + cost_s) / tau_s

        least = min(slower(k / 10) for k in range(10, 5000))
        best = replicas.best_efficiency(cost_s, 100, restart_s=restart_s, safe_saves=True)
        assert best == pytest.approx(1 / least, rel=1e-5)


def test_nothing_to_limit() -> None:
    assert replicas.best_efficiency(10, math.inf) == 1
    assert replicas.best_efficiency(0, 100, restart_s=100) == pytest.approx(1 / math.e)
    assert replicas.gpus_at(0.5, GPU_MTBF_S, 0.0) == math.inf
    with pytest.raises(UsageError, match=r"one GPU is no better than 0\.5"):
        replicas.gpus_at(0.5, 100, 1e3)
    with pytest.raises(UsageError, match="efficiency must lie between 0 and 1"):
        replicas.gpus_at(1.0, 100, 1.0)


def test_impossible_groups() -> None:
    with pytest.raises(UsageError, match=r"members must be a whole number, not 2\.5"):
        replicas.loss_rate_per_s(100, 2.5, NODE, 10)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="1 nodes make no group of 2"):
        replicas.loss_rate_per_s(1, 2, NODE, 10)
    with pytest.raises(UsageError, match="window_s must be 0 or above"):
        replicas.loss_rate_per_s(10, 2, NODE, -1)
