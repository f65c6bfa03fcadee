"""Compilation by Numba, and counter-based random numbers for compiled code."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a function that only compiled code calls.

    A division by zero gives infinity: an exception would cost every division a branch.
    """
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast("F", njit(error_model="numpy", **options)(function))


def inlined(function: F) -> F:
    """Inline a function with one or two callers before compilation, which halves compile time."""
    return cast("F", njit(error_model="numpy", inline="always")(function))


def cached(function: F) -> F:
    """Compile a function that Python calls, without the interpreter's lock.

    The result is cached beside the source or in the user's cache, whichever is writable; if neither
    is, each process compiles.
    """
    options: dict[str, Any] = {"error_model": "numpy", "nogil": True}
    try:
        return cast("F", njit(cache=True, **options)(function))
    except RuntimeError:  # no cache directory is writable
        return cast("F", njit(**options)(function))


def sources() -> str:
    """Return a digest of the compiled source files."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in _files())).hexdigest()


def is_kept(function: Callable[..., Any]) -> bool:
    """Return whether the compiled form of a `cached` function is newer than its sources."""
    folder = getattr(getattr(function, "stats", None), "cache_path", None)
    changed_s = max(path.stat().st_mtime for path in _files())
    indexes = Path(folder).glob("*.nbi") if folder else ()
    return any(path.stat().st_mtime >= changed_s for path in indexes)


def _files() -> list[Path]:
    names = ("compiled_random", "simulated_job", "simulated_nodes", "simulation_kernel")
    return [Path(__file__).with_name(f"{name}.py") for name in names]


def _bare(_: Any, tables: Any) -> Any:
    pointers = types.NamedTuple([types.CPointer(t.dtype) for t in tables], tables.instance_class)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = (builder.extract_value(args[0], k) for k in range(len(tables)))
        arrays = zip(tables, values, strict=True)
        members = [context.make_array(kind)(context, builder, each).data for kind, each in arrays]
        return context.make_tuple(builder, signature.return_type, members)

    return pointers(tables), codegen


# Convert a named tuple of arrays to pointers to their first elements; the caller keeps the arrays
# alive. Passing an array costs two atomic instructions and seven words. To find an index out of
# bounds, pass the arrays and set NUMBA_BOUNDSCHECK=1.
bare = cast("Callable[[Any], Any]", intrinsic(_bare))


SLOTS = 1 << 16  # numbers that one event may need

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_30 = np.uint64(30)
_27 = np.uint64(27)
_31 = np.uint64(31)
_11 = np.uint64(11)


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
    result = 1.0
    for attempt in range(64):  # each succeeds with more than 95 %
        slot_at = slot + 3 * attempt
        radius = math.sqrt(-2 * math.log(uniform(key, event, slot_at)))
        normal = radius * math.cos(2 * math.pi * uniform(key, event, slot_at + 1))
        v = (1 + c * normal) ** 3
        u = uniform(key, event, slot_at + 2)
        if v > 0 and math.log(u) < 0.5 * normal * normal + d * (1 - v + math.log(v)):
            result = d * v
            break
    if shape < 1:
        result *= uniform(key, event, slot + 200) ** (1 / shape)
    return result / shape
