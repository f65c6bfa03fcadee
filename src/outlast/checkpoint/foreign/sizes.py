"""What others call a tensor's shape, checked before anybody multiplies it."""

from __future__ import annotations

from typing import Any

DIMS_MAX = 64  # NumPy's
_SIZE_MAX = (1 << 63) - 1  # torch's


def sizes_of(values: Any) -> tuple[int, ...]:
    """A tensor's sizes, strides or offsets. Raises TypeError or ValueError for what is none."""
    sizes = tuple(values)
    if len(sizes) > DIMS_MAX:
        raise ValueError(f"{len(sizes)} dimensions, where {DIMS_MAX} are possible")
    if not all(type(n) is int for n in sizes):
        raise TypeError("a tensor's sizes are no whole numbers")
    if sizes and not 0 <= min(sizes) <= max(sizes) <= _SIZE_MAX:
        raise ValueError("a tensor's sizes are negative, or larger than any")
    return sizes
