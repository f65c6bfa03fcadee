"""Rows of a batch: tensors, in containers, with a common first dimension."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

_DEPTH = 4  # of containers around tensors


def common_size(values: Iterable[Any]) -> int:
    """Return the first dimension of all tensors in these values; 0 if there are none, or they
    differ."""
    sizes = {each.shape[0] if each.dim() else 0 for value in values for each in _tensors(value)}
    return sizes.pop() if len(sizes) == 1 else 0


def cut_rows(value: Any, low: int, high: int, size: int, depth: int = _DEPTH) -> Any:
    """Return a value with the rows from `low` to `high` of its tensors, and of its lists that have
    an item for each of the `size` rows."""
    if isinstance(value, torch.Tensor):
        return value[low:high]
    if not depth:
        return value
    if isinstance(value, dict):
        return {key: cut_rows(each, low, high, size, depth - 1) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named: Any = type(value)
        return named(*(cut_rows(each, low, high, size, depth - 1) for each in value))
    if type(value) in (list, tuple):
        if type(value) is list and len(value) == size and not any(True for _ in _tensors(value)):
            return value[low:high]  # texts, one a sample
        return type(value)(cut_rows(each, low, high, size, depth - 1) for each in value)
    return value


def _tensors(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)) and depth:
        items: Any = value.values() if isinstance(value, dict) else value
        for each in items:
            yield from _tensors(each, depth - 1)
