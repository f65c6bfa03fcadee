"""Results of a phase that died with their worker, as its successor sees them.

floating-point number, tensor, array    NaN: it stays visible in sums and logs
None                                    None
container                               the same container of these
anything else                           `LostResult`: its use takes the job back to a copy
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch

# To test, compare, count, index, iterate, convert or call it needs the value itself.
_USES = (
    "bool", "eq", "ne", "lt", "le", "gt", "ge", "hash", "len", "iter", "next", "contains",
    "getitem", "call", "int", "float", "complex", "index", "add", "radd", "sub", "rsub", "mul",
    "rmul", "truediv", "rtruediv", "floordiv", "mod", "and", "rand", "or", "ror", "xor", "invert",
    "neg", "fspath", "enter",
)  # fmt: skip


class LostResult:
    """A value that nobody knows and that no number can stand for: a flag, a name, an object.

    It may be kept, passed on and printed. `use` is called by everything else, and does not return.
    """

    def __init__(self, use: Callable[[], NoReturn]) -> None:
        self._use = use

    def __repr__(self) -> str:
        return "<lost with its worker>"

    def __format__(self, _: str) -> str:
        return repr(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a protocol of Python's that it does not take part in
            raise AttributeError(name)
        self._use()


def _used(self: LostResult, *_: Any) -> NoReturn:
    self._use()


for _name in _USES:
    setattr(LostResult, f"__{_name}__", _used)


def unknown(value: Any, use: Callable[[], NoReturn]) -> Any:
    """Return what stands for a result that nobody knows. `value` is a dry run's, which only looks
    like it; `use` is called when the script uses what NaN cannot stand for."""
    if value is None:
        return None
    if isinstance(value, (float, np.floating)):
        return math.nan
    if isinstance(value, (complex, np.complexfloating)):
        return complex(math.nan, math.nan)
    if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
        return torch.full_like(value, math.nan)
    if isinstance(value, np.ndarray) and value.dtype.kind in "fc":
        return np.full_like(value, math.nan)
    if isinstance(value, dict):
        return {key: unknown(item, use) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named: Any = type(value)
        return named(*(unknown(item, use) for item in value))
    if type(value) is list:
        return [unknown(item, use) for item in value]
    if type(value) is tuple:
        return tuple(unknown(item, use) for item in value)
    return LostResult(use)


def is_evidence(value: Any) -> bool:
    """Return whether the same value on several ranks means that it is equal on all: it has a
    floating-point number in it. Flags and counts of one rank alone often agree by chance."""
    if isinstance(value, dict):
        return any(map(is_evidence, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(is_evidence, value))
    if isinstance(value, torch.Tensor):
        return value.numel() > 0 and (value.is_floating_point() or value.is_complex())
    if isinstance(value, np.ndarray):
        return value.size > 0 and value.dtype.kind in "fc"
    return isinstance(value, (float, complex, np.inexact))
