"""The numbers of `outlast.plan.stream`, one at a time, the same for key, event and slot."""

from __future__ import annotations

import math

SLOTS = 1 << 16
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mixed(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def key_of(seed: int, replication: int) -> int:
    """The stream of one replication."""
    return _mixed((_mixed((seed + _GOLDEN) & _MASK) + replication * _GOLDEN) & _MASK)


def uniform(key: int, event: int, slot: int) -> float:
    """Between 0 and 1, neither of them."""
    counter = event * SLOTS + slot + 1
    return ((_mixed((key + counter * _GOLDEN) & _MASK) >> 11) + 0.5) * 2.0**-53


def exponential(key: int, event: int, slot: int) -> float:
    """With mean 1."""
    return -math.log(uniform(key, event, slot))


def gap(key: int, event: int, slot: int, spread: float) -> float:
    """Between two failures, with mean 1: evenly spread to `spread` of it, or exponential if that is
    negative."""
    if spread < 0:
        return exponential(key, event, slot)
    return 1 + spread * (2 * uniform(key, event, slot) - 1)


def gamma(key: int, event: int, slot: int, shape: float) -> float:
    """With mean 1 and the given shape (1: exponential), by Marsaglia and Tsang 2000."""
    if shape == 1:
        return exponential(key, event, slot)
    d = (shape if shape >= 1 else shape + 1) - 1 / 3
    c = 1 / math.sqrt(9 * d)
    found = 1.0
    for at in range(slot, slot + 192, 3):  # each succeeds with more than 95 %
        radius = math.sqrt(-2 * math.log(uniform(key, event, at)))
        normal = radius * math.cos(2 * math.pi * uniform(key, event, at + 1))
        v = (1 + c * normal) ** 3
        log_u = math.log(uniform(key, event, at + 2))
        if v > 0 and log_u < 0.5 * normal * normal + d * (1 - v + math.log(v)):
            found = d * v
            break
    if shape < 1:
        found *= uniform(key, event, slot + 200) ** (1 / shape)
    return found / shape
