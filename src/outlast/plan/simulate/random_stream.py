"""Counter-based random numbers: a hash of key, event and slot."""

from __future__ import annotations

import math

import numpy as np

from outlast.plan.simulate.numba_compilation import compiled

SLOTS = 1 << 16  # numbers that one event may need

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


@compiled
def _mixed(value: np.uint64) -> np.uint64:
    """Return splitmix64's output function (Steele, Lea, Flood 2014) of a value.

    Every bit of the result depends on every bit of the argument.
    """
    value = (value ^ (value >> _30)) * _MIX_1
    value = (value ^ (value >> _27)) * _MIX_2
    return value ^ (value >> _31)


@compiled
def key_of(seed: int, replication: int) -> np.uint64:
    """Return the random stream of one replication."""
    return _mixed(_mixed(np.uint64(seed) + _GOLDEN) + np.uint64(replication) * _GOLDEN)


@compiled
def uniform(key: np.uint64, event: int, slot: int) -> float:
    """Return a number between 0 and 1, both excluded."""
    counter = np.uint64(event * SLOTS + slot + 1)
    return (float(_mixed(key + counter * _GOLDEN) >> _11) + 0.5) * 2.0**-53


@compiled
def exponential(key: np.uint64, event: int, slot: int) -> float:
    """Return an exponential number with mean 1."""
    return -math.log(uniform(key, event, slot))


@compiled
def gap(key: np.uint64, event: int, slot: int, spread: float) -> float:
    """Return a gap between two failures, with mean 1.

    Uniform within `spread` of the mean, or exponential if `spread` is negative.
    """
    if spread < 0:
        return exponential(key, event, slot)
    return 1 + spread * (2 * uniform(key, event, slot) - 1)


@compiled
def gamma(key: np.uint64, event: int, slot: int, shape: float) -> float:
    """Return a gamma number with mean 1 and the given shape (1: exponential).

    By Marsaglia and Tsang 2000.
    """
    if shape == 1.0:
        return exponential(key, event, slot)
    boost = shape if shape >= 1 else shape + 1
    d = boost - 1 / 3
    c = 1 / math.sqrt(9 * d)
    found = 1.0
    for turn in range(64):  # each succeeds with more than 95 %
        at = slot + 3 * turn
        radius = math.sqrt(-2 * math.log(uniform(key, event, at)))
        normal = radius * math.cos(2 * math.pi * uniform(key, event, at + 1))
        v = (1 + c * normal) ** 3
        u = uniform(key, event, at + 2)
        if v > 0 and math.log(u) < 0.5 * normal * normal + d * (1 - v + math.log(v)):
            found = d * v
            break
    if shape < 1:
        found *= uniform(key, event, slot + 200) ** (1 / shape)
    return found / shape
