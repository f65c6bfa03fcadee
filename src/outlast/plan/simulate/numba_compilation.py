"""Compilation of the simulator by Numba."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

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
    except RuntimeError:  # there is no such place
        return cast("F", njit(**options)(function))


def sources() -> str:
    """Return a digest of the compiled source files."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in _files())).hexdigest()


def is_kept(function: Callable[..., Any]) -> bool:
    """Return whether any process has compiled a `cached` function since its sources changed."""
    folder = getattr(getattr(function, "stats", None), "cache_path", None)
    changed_s = max(path.stat().st_mtime for path in _files())
    kept = Path(folder).glob("*.nbi") if folder else ()
    return any(path.stat().st_mtime >= changed_s for path in kept)


def _files() -> list[Path]:
    names = ("numba_compilation", "random_stream", "simulated_job", "simulated_nodes",
             "simulation_kernel")  # fmt: skip
    return [Path(__file__).with_name(f"{name}.py") for name in names]


def _bare(_: Any, tables: Any) -> Any:
    pointers = types.NamedTuple([types.CPointer(t.dtype) for t in tables], tables.instance_class)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = (builder.extract_value(args[0], k) for k in range(len(tables)))
        arrays = zip(tables, values, strict=True)
        members = [context.make_array(kind)(context, builder, each).data for kind, each in arrays]
        return context.make_tuple(builder, signature.return_type, members)

    return pointers(tables), codegen


# A named tuple of arrays as one of pointers to their first elements, which the caller must keep
# alive: passing on an array costs two atomic instructions, and seven words. To find an index that
# is wrong, do without it and set NUMBA_BOUNDSCHECK=1.
bare = cast("Callable[[Any], Any]", intrinsic(_bare))
