"""Summaries of partial values against NumPy on all values."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from outlast.plan.answers.run_distribution import ACCURACY, StreamingSummary, Tally

VALUES = st.lists(
    st.one_of(st.floats(0, 1e12, allow_subnormal=False), st.integers(0, 4095), st.just(math.inf)),
    min_size=1, max_size=60,
)  # fmt: skip


def summed(values: list[float], cut: int) -> StreamingSummary:
    found = StreamingSummary()
    for part in (values[:cut], values[cut:]):
        found.add(np.array(part))
    return found


@settings(max_examples=60)
@given(VALUES, st.integers(0, 60), st.floats(0, 1))
def test_streaming_statistics_equal_those_of_all_values(
    values: list[float], cut: int, probability: float
) -> None:
    found = summed(values, cut)
    ended = [one for one in values if one < math.inf]
    assert (found.count, found.endless) == (len(values), len(values) - len(ended))
    exact = np.quantile(values, probability, method="inverted_cdf")
    assert found.quantile(probability) == pytest.approx(exact, rel=ACCURACY)
    if len(ended) < len(values):
        assert found.mean == math.inf and math.isnan(found.error)
    elif len(values) > 1:
        assert found.mean == pytest.approx(np.mean(values), rel=1e-12, abs=1e-300)
        error = np.std(values, ddof=1) / math.sqrt(len(values))
        assert found.error == pytest.approx(error, rel=1e-6, abs=1e-9 * found.mean)


def test_whole_numbers_are_themselves() -> None:
    found = summed([float(one) for one in range(4096)], 1000)
    assert all(found.quantile((one + 1) / 4096) == one for one in range(4096))


def test_nothing_has_no_quantile() -> None:
    assert math.isnan(StreamingSummary().mean) and math.isnan(StreamingSummary().quantile(0.5))


def test_memory_does_not_grow_with_values() -> None:
    """A hundred times as many, of the same law."""
    found, random = StreamingSummary(), np.random.default_rng(1)
    held: list[int] = []
    tracemalloc.start()
    try:
        for part in range(300):
            found.add(random.gamma(100.0, 1e5, 4096))
            if part in (2, 299):
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[1] < held[0] + 100_000


def test_differences_below_one_per_cent_are_not_reported() -> None:
    plain = Tally(name="", unit="s", mean=1.009, error=1e-4, low=1, middle=1, high=1, predicted=1.0)
    assert replace(plain, z=90.0).differs() == 0
    assert replace(plain, mean=1.02, z=3.9).differs() == 0
    assert replace(plain, mean=1.02, z=200.0).differs() == pytest.approx(0.02)
