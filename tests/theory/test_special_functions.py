"""Lambert W, the root in both optimal intervals; the minimum of a function."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import UsageError
from outlast.theory.numerics import find_minimum, one_plus_w0


@given(st.floats(1e-300, 1e300))
def test_it_is_lamberts(p: float) -> None:
    mpmath = pytest.importorskip("mpmath", reason="the reference")
    with mpmath.workdps(400 if p < 1e-20 else 60):
        true = 1 + mpmath.lambertw((mpmath.mpf(p) - 1) / mpmath.e).real
        assert abs(one_plus_w0(p) / true - 1) < 1e-14


@pytest.mark.parametrize(
    ("p", "u"),
    [
        (0.0, 0.0),  # the branch point: W0(-1/e) = -1
        (1.0, 1.0),  # W0(0) = 0
        (1 + math.e, 1.5671432904097838),  # W0(1): the omega constant
        (1 + math.e**2, 2.0),  # W0(e) = 1
        (2e-16, 2e-8),  # sqrt(2 p), where (p - 1)/e is -1/e but for its last bit
    ],
)
def test_known_values(p: float, u: float) -> None:
    assert one_plus_w0(p) == pytest.approx(u, rel=1e-8 if p == 2e-16 else 1e-15)


@pytest.mark.parametrize("p", [-1e-9, math.nan, math.inf])
def test_outside(p: float) -> None:
    with pytest.raises(UsageError, match="p must be 0 or above"):
        one_plus_w0(p)


@given(
    st.floats(-6, 19),
    st.floats(0.1, 3),
    st.floats(0, 10),
    st.floats(2, 40),
)
def test_a_minimum_with_a_flat_and_an_infinite_high_side(
    at: float, steepness: float, flat_from: float, endless_from: float
) -> None:
    lowest = math.exp(at)
    calls = 0

    def function(x: float) -> float:
        nonlocal calls
        calls += 1
        away = math.log(min(x, lowest * math.exp(flat_from)) / lowest)
        return math.inf if math.log(x) - at > endless_from else math.cosh(steepness * away)

    found = find_minimum(function, 1e-3, 1e9)
    assert abs(math.log(found) - at) < 1e-6
    assert calls < 80
    for away in (-30, -3, 0, 1, 30):
        near = min(max(lowest * math.exp(away), 1e-3), 1e9)
        found = find_minimum(function, 1e-3, 1e9, near=near)
        assert abs(math.log(found) - at) < 1e-6


def test_a_guess_saves_steps() -> None:
    found: dict[float | None, int] = {}
    for near in (None, 2.0):
        calls: list[float] = []
        find_minimum(lambda x, calls=calls: calls.append(x) or x + 5 / x, 1e-3, 1e9, near=near)
        found[near] = len(calls)
    assert found[2.0] <= 10 and found[None] <= 15, found


def test_a_minimum_at_either_end() -> None:
    assert find_minimum(lambda x: x, 1e-3, 1e9) == pytest.approx(1e-3)
    assert find_minimum(lambda x: -x, 1e-3, 1e9) == pytest.approx(1e9)
    assert find_minimum(lambda x: -x, 1e-3, 1e9, near=9e8) == pytest.approx(1e9)
    assert find_minimum(lambda _: math.inf, 1e-3, 1e9) == pytest.approx(1e-3)
