"""r_f and MTTF by job size, on jobs with a known failure rate."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fleet.poisson_jobs import poisson_jobs
from tests.fleet.small_clusters import cluster, job

from outlast.fleet.analysis.confidence_intervals import bootstrap_interval, garwood, jeffreys
from outlast.fleet.analysis.failure_attribution import attribute_failures
from outlast.fleet.analysis.failure_rates import failure_rate, mttf
from outlast.theory import numerics


def test_failures_by_node_days_of_jobs_above_a_size() -> None:
    found = cluster(
        job("1", gpus=256, nodes=32, hours=24, end=48, state="NODE_FAIL"),
        job("2", gpus=256, nodes=32, hours=24, end=72),
        job("3", gpus=128, nodes=16, hours=24, end=72, state="NODE_FAIL"),  # not above 128
        job("4", gpus=256, nodes=32, start_ns=None, state="BOOT_FAIL"),
    )
    told = failure_rate(found, attribute_failures(found))
    assert (told.attempts, told.failures) == (2, 1)
    assert told.node_days == pytest.approx(64)
    assert told.gpu_days == pytest.approx(512)
    assert told.per_1000_node_days == pytest.approx(1000 / 64)
    assert told.low == pytest.approx(1000 / 64 * numerics.gamma_quantile(1.5, 0.05))
    assert told.high == pytest.approx(1000 / 64 * numerics.gamma_quantile(1.5, 0.95))


def test_only_time_in_the_window_counts() -> None:
    found = cluster(
        job("1", gpus=256, nodes=32, hours=48, end=24),  # a day of it before the window
        job("2", gpus=256, nodes=32, hours=48, end=264, state="NODE_FAIL"),  # a day of it after
        job("3", gpus=256, nodes=32, hours=24, end=120, state="RUNNING"),
    )
    told = failure_rate(found, attribute_failures(found))
    assert told.node_days == pytest.approx(32 * 3)
    assert (told.failures, told.per_1000_node_days) == (0, 0)


def test_without_large_jobs_there_is_no_rate() -> None:
    found = cluster(job())
    told = failure_rate(found, attribute_failures(found))
    assert told.per_1000_node_days is told.low is told.boot_low is told.dispersion is None
    table = mttf(found, attribute_failures(found))
    assert table["projected_h"].to_list() == [None]


def test_a_size_without_failures_has_a_lower_bound() -> None:
    found = cluster(
        job("1", hours=30, end=60), job("2", gpus=9, nodes=2, hosts="n[1-2]", hours=10, end=60)
    )
    told = mttf(found, attribute_failures(found))
    assert told["gpus"].to_list() == [8, 16]
    assert told["mttf_h"].to_list() == told["high_h"].to_list() == [None, None]
    assert told["low_h"].to_list() == pytest.approx([30 / -np.log(0.05), 10 / -np.log(0.05)])


def test_mttf_falls_with_size_as_projected() -> None:
    found = poisson_jobs(1, jobs=6000)
    told = mttf(found, attribute_failures(found)).filter(pl.col("failures") > 60)
    assert told["gpus"].to_list() == [64, 256, 512]
    for mttf_h, low_h, high_h, projected_h in told.select(
        "mttf_h", "low_h", "high_h", "projected_h"
    ).iter_rows():
        assert low_h < mttf_h < high_h
        assert projected_h == pytest.approx(mttf_h, rel=0.25)


def test_the_true_rate_is_in_the_interval_nine_times_of_ten() -> None:
    inside = {"gamma": 0, "boot": 0}
    for seed in range(40):
        found = poisson_jobs(seed, jobs=400)
        told = failure_rate(found, attribute_failures(found))
        inside["gamma"] += told.low < 6.5 < told.high
        inside["boot"] += told.boot_low < 6.5 < told.boot_high
    assert 33 <= inside["gamma"] <= 39, inside
    assert 31 <= inside["boot"] <= 39, inside


def test_crash_loops_are_less_sure_than_their_count() -> None:
    alone, loops = poisson_jobs(7), poisson_jobs(7, again=0.5)
    told = [failure_rate(found, attribute_failures(found)) for found in (alone, loops)]
    assert told[0].dispersion < 1.5 < 2 < told[1].dispersion
    assert told[1].sure_as < told[1].failures / 2
    assert told[1].boot_high - told[1].boot_low > 1.3 * (told[1].high - told[1].low)


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_the_exact_interval_holds_the_gamma_one(count: int) -> None:
    low, high = jeffreys(count)
    least, most = garwood(count)
    assert least <= low < high <= most
    assert least <= count <= most


def test_clusters_drawn_anew_agree_with_poisson_where_failures_are_independent() -> None:
    rng = np.random.default_rng(3)
    exposure = rng.uniform(50, 150, 200)
    told = bootstrap_interval(rng.poisson(0.05 * exposure).astype(float), exposure)
    assert told.dispersion == pytest.approx(1, abs=0.3)
    count = 0.05 * exposure.sum()
    width = (jeffreys(round(count))[1] - jeffreys(round(count))[0]) / exposure.sum()
    assert told.high - told.low == pytest.approx(width, rel=0.3)
    assert bootstrap_interval(np.zeros(5), np.ones(5)).low is None
    assert bootstrap_interval(np.ones(1), np.ones(1)).low is None
