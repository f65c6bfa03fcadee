"""Mean, standard error and quantiles of any number of values, in memory that does not grow with
them."""

from __future__ import annotations

import math

import numpy as np

_KEPT_BITS = 11
ACCURACY = 2.0**-_KEPT_BITS  # relative, of a quantile
_SHIFT = 52 - _KEPT_BITS


class Summary:
    """Of one column of numbers that are not negative; infinity is one of them.

    Values that agree in their exponent and its next 11 bits are counted together, and stand for
    their mean: a quantile is within ACCURACY of the true one, and is it where the values are whole
    numbers below 4,096. Each doubling of the largest over the smallest costs 48 kB at most.
    """

    def __init__(self) -> None:
        self.count = 0
        self.endless = 0
        self._mean = 0.0
        self._squares = 0.0
        self._keys = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._sums = np.empty(0)

    def add(self, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values, np.float64)
        ended = values[np.isfinite(values)]
        before, many = self.count - self.endless, len(ended)
        self.count += len(values)
        self.endless += len(values) - many
        if many:  # Chan, Golub and LeVeque's: two samples' moments give those of both
            mean, total = float(ended.mean()), before + many
            shift = mean - self._mean
            self._squares += float(((ended - mean) ** 2).sum()) + shift**2 * before * many / total
            self._mean += shift * many / total
        keys = np.concatenate((self._keys, values.view(np.int64) >> _SHIFT))
        ones = np.ones(len(values), np.int64)
        self._keys, where = np.unique(keys, return_inverse=True)
        self._counts = _by_key(where, np.concatenate((self._counts, ones))).astype(np.int64)
        self._sums = _by_key(where, np.concatenate((self._sums, values)))

    @property
    def mean(self) -> float:
        """Infinity where one value is; NaN of nothing."""
        return math.inf if self.endless else self._mean if self.count else math.nan

    @property
    def error(self) -> float:
        """Standard error of the mean; NaN where there is none."""
        if self.endless or self.count < 2:
            return math.nan
        return math.sqrt(self._squares / (self.count - 1) / self.count)

    def quantile(self, probability: float) -> float:
        """The smallest value that at least this share of all are not above; NaN of nothing."""
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(probability * self.count))
        at = int(np.searchsorted(np.cumsum(self._counts), rank))
        return float(self._sums[at] / self._counts[at])


def _by_key(where: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.bincount(where, weights=weights)
