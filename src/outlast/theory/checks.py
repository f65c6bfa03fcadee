"""Impossible numbers are refused by name, before a formula turns them into plausible ones."""

from __future__ import annotations

import math

from outlast.errors import UsageError


def positive(name: str, value: float, *, endless: bool = False) -> None:
    """`value` is above 0, and finite unless `endless`. Raises UsageError."""
    if not value > 0 or (math.isinf(value) and not endless):
        raise UsageError(f"{name} must be above 0{'' if endless else ' and finite'}, not {value!r}")


def not_negative(name: str, value: float) -> None:
    """`value` is 0 or above, and finite. Raises UsageError."""
    if not 0 <= value < math.inf:
        raise UsageError(f"{name} must be 0 or above and finite, not {value!r}")


def whole(name: str, value: float) -> None:
    """`value` is 0, 1, 2, ... Raises UsageError."""
    not_negative(name, value)
    if value != math.floor(value):
        raise UsageError(f"{name} must be a whole number, not {value!r}")


def share(name: str, value: float) -> None:
    """`value` lies between 0 and 1. Raises UsageError."""
    if not 0 <= value <= 1:
        raise UsageError(f"{name} is a share, from 0 to 1, not {value!r}")
