"""Lambert W, the root in both optimal intervals."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import UsageError
from outlast.theory.numerics import one_plus_w0


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
