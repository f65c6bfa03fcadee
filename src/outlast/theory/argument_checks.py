"""Checks of formula arguments, and their broadcasting over arrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

from outlast.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = float | Sequence[float] | NDArray[Any]

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
SCALARS = frozenset({float, int, bool})


class Broadcasting(Protocol[P, R]):
    """A number for numbers; an array where any argument is an array, a list or a tuple."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __call__(self, *args: Numbers, **kwargs: Numbers) -> NDArray[Any]: ...


def broadcasts(function: Callable[P, R]) -> Broadcasting[P, R]:
    """`function`, applied to each element where arguments are arrays, by NumPy's broadcasting.

    It stays a function of plain numbers, and is called once an element. An impossible element
    raises what it would raise alone; shapes that do not fit together raise UsageError.
    """
    names = function.__code__.co_varnames  # type: ignore[attr-defined]  # a plain function

    @functools.wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        if SCALARS.issuperset(map(type, args)) and SCALARS.issuperset(map(type, kwargs.values())):
            return function(*args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        if len(given) < len(args) + len(kwargs) or not any(map(_is_array, given.values())):
            return function(*args, **kwargs)
        return _each(function, given)

    return either


def _is_array(value: object) -> bool:
    return isinstance(value, list | tuple) or hasattr(value, "__array__")


def _each(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    import numpy as np

    arrays = {name: np.asarray(value) for name, value in given.items()}
    try:
        shape = np.broadcast_shapes(*(one.shape for one in arrays.values()))
    except ValueError:
        shapes = ", ".join(f"{name} {one.shape}" for name, one in arrays.items() if one.ndim)
        raise UsageError(f"these shapes do not fit together: {shapes}") from None
    columns = [np.broadcast_to(one, shape).ravel().tolist() for one in arrays.values()]
    rows = zip(*columns, strict=True)
    results = [function(**dict(zip(arrays, row, strict=True))) for row in rows]
    if shape == ():
        return results[0]
    return np.array(results, dtype=None if results else float).reshape(shape)


def check_positive(name: str, value: float, *, endless: bool = False) -> None:
    """`value` is above 0, and finite unless `endless`. Raises UsageError."""
    if not value > 0 or (math.isinf(value) and not endless):
        raise UsageError(f"{name} must be above 0{'' if endless else ' and finite'}, not {value!r}")


def check_not_negative(name: str, value: float) -> None:
    """`value` is 0 or above, and finite. Raises UsageError."""
    if not 0 <= value < math.inf:
        raise UsageError(f"{name} must be 0 or above and finite, not {value!r}")


def check_whole(name: str, value: float) -> None:
    """`value` is 0, 1, 2, ... Raises UsageError."""
    check_not_negative(name, value)
    if value != math.floor(value):
        raise UsageError(f"{name} must be a whole number, not {value!r}")


def check_share(name: str, value: float) -> None:
    """`value` lies between 0 and 1. Raises UsageError."""
    if not 0 <= value <= 1:
        raise UsageError(f"{name} is a share, from 0 to 1, not {value!r}")
