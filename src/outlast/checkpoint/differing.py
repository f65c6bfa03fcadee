"""Two decoded values held against each other, bit by bit: where they differ, by path."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch

from outlast.checkpoint import tree

_LISTED_MAX = 8  # longer lists of numbers are told by how many of them differ
_NUMBERS = (bool, int, float)
_SHOWN_MAX = 60
_ABSENT = object()


class ValueDifference(NamedTuple):
    """Where (`groups.0.lr`), and in short what is there; "" where there is nothing."""

    path: str
    a: str
    b: str


def differences(a: Any, b: Any) -> list[ValueDifference]:
    """Every place where the two differ. A NaN equals itself, -0.0 is not 0.0, 1 is not 1.0."""
    return list(_walk((), a, b))


def _walk(path: tuple[str, ...], a: Any, b: Any) -> Iterator[ValueDifference]:
    if type(a) is type(b):
        if isinstance(a, Mapping):
            for key in {**a, **b}:
                yield from _walk((*path, str(key)), a.get(key, _ABSENT), b.get(key, _ABSENT))
            return
        if isinstance(a, (list, tuple)):
            if _many_numbers(a) and _many_numbers(b):
                if differing := sum(_odd(x, y) for x, y in zip_longest(a, b, fillvalue=_ABSENT)):
                    yield _counted(path, differing, len(a), len(b))
                return
            for index, (x, y) in enumerate(zip_longest(a, b, fillvalue=_ABSENT)):
                yield from _walk((*path, str(index)), x, y)
            return
        if isinstance(a, (torch.Tensor, np.ndarray)):
            yield from _arrays(path, _flat(a), _flat(b), _kind(a), _kind(b))
            return
    if _odd(a, b):
        yield ValueDifference(".".join(path), _short(a), _short(b))


def _arrays(path: tuple[str, ...], a: Any, b: Any, one: str, two: str) -> Iterator[ValueDifference]:
    """`a` and `b`: rows of bytes, one for each element."""
    if one != two:
        yield ValueDifference(".".join(path), one, two)
    elif differing := int((a != b).any(axis=1).sum()):
        yield _counted(path, differing, len(a), len(b))


def _flat(array: torch.Tensor | np.ndarray[Any, Any]) -> Any:
    elements = array.numel() if isinstance(array, torch.Tensor) else array.size
    data = tree.raw(array.contiguous()) if isinstance(array, torch.Tensor) else array.tobytes()
    return np.frombuffer(data, np.uint8).reshape(max(elements, 1), -1)


def _kind(array: torch.Tensor | np.ndarray[Any, Any]) -> str:
    shape = " x ".join(map(str, array.shape)) or "one number"
    return f"{str(array.dtype).removeprefix('torch.')} {shape}"


def _counted(path: tuple[str, ...], differing: int, one: int, two: int) -> ValueDifference:
    said = f"{differing} differ of {one}"
    return ValueDifference(".".join(path), said, said if one == two else f"of {two}")


def _many_numbers(values: Sequence[Any]) -> bool:
    return len(values) > _LISTED_MAX and all(type(value) in _NUMBERS for value in values)


def _odd(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return True
    if isinstance(a, (float, np.floating)):
        return struct.pack("d", a) != struct.pack("d", b)
    if isinstance(a, complex):
        return struct.pack("dd", a.real, a.imag) != struct.pack("dd", b.real, b.imag)
    return bool(a != b)


def _short(value: Any) -> str:
    if value is _ABSENT:
        return ""
    line = " ".join(repr(value).split())
    return line if len(line) <= _SHOWN_MAX else line[: _SHOWN_MAX - 3] + "..."
