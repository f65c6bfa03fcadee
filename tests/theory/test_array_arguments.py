"""Array arguments of the formulas, and the cost for plain numbers."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from outlast.errors import UsageError
from outlast.theory import intervals, spares
from outlast.theory.numerics import broadcasts


@broadcasts
def weighed(length_s: float, times: int = 2, *, more_s: float = 0.0) -> float:
    """What it says."""
    if length_s < 0:
        raise UsageError(f"length_s must not be negative, not {length_s!r}")
    return length_s * times + more_s


def test_numbers_stay_numbers() -> None:
    assert weighed(2.0) == 4.0
    assert weighed(2, times=3, more_s=1) == 7
    assert type(intervals.young(5.0, 1e4)) is float
    assert type(spares.quantile(0.999, 480.0)) is int
    assert weighed.__doc__ == "What it says."
    with pytest.raises(TypeError):
        weighed(1.0, unknown=2)  # type: ignore[call-arg]


def test_arrays_broadcast() -> None:
    np = pytest.importorskip("numpy")
    taus = np.linspace(100, 1000, 4)
    told = intervals.segment_s(taus, 5.0, 1e4, restart_s=60)
    assert told.shape == (4,) and told.dtype == float
    assert told.tolist() == [intervals.segment_s(t, 5.0, 1e4, restart_s=60) for t in taus.tolist()]
    grid = intervals.efficiency(taus[:, None], 5.0, mtbf_s=[1e3, 1e4])
    assert grid.shape == (4, 2) and grid[3, 1] == intervals.efficiency(1000.0, 5.0, 1e4)
    assert type(intervals.young(np.float64(5), 1e4)) is float
    assert intervals.young(np.zeros((0, 3)), 1e4).shape == (0, 3)
    assert intervals.in_regime([30, 31], 100).tolist() == [True, False]
    assert weighed([1, 2]).tolist() == [2, 4]


def test_impossible_values_are_named() -> None:
    np = pytest.importorskip("numpy")
    with pytest.raises(UsageError, match=r"cost_s must be 0 or above and finite, not -3\.0$"):
        intervals.young(np.array([1.0, -3.0]), 1e4)
    with pytest.raises(UsageError, match=r"do not fit together: cost_s \(3,\), mtbf_s \(4,\)"):
        intervals.young(np.ones(3), np.ones(4))


def test_numbers_need_no_numpy() -> None:
    """The base install has none: every module works, and none is imported."""
    code = """
import importlib, pkgutil, sys
import outlast.theory as theory
sys.modules["numpy"] = sys.modules["scipy"] = None
names = [one.name for one in pkgutil.iter_modules(theory.__path__)]
for name in names: importlib.import_module("outlast.theory." + name)
from outlast.theory import intervals, spares
assert intervals.optimum(5.0, 1e4) > 0 and spares.quantile(0.999, 480.0) == 549
print(len(names))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) >= 9


def test_infinity_travels() -> None:
    np = pytest.importorskip("numpy")
    assert intervals.segment_s(np.array([10.0]), 1e6, 10.0).tolist() == [math.inf]
