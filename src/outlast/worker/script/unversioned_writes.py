"""Code that can write a tensor's memory without torch's version counter.

`parameter.data.add_(...)`, NumPy's view of a parameter, and raw memory move no counter. Whether a
phase has such code follows from the bytecode of what it can run: the script's own functions, hooks
of its modules, and methods of libraries' classes that these functions name (an EMA's `copy_to`, a
layer's `forward`). Optimizers step behind the vote and do not count; nor does torch's own code,
beside the functions in `_WRITERS`.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from outlast.worker.script.bytecode import names_of, nested
from outlast.worker.script.value_paths import is_own_file, unwrapped

_WRITERS = {
    "__array__",
    "_apply",
    "asarray",
    "data_ptr",
    "from_dlpack",
    "numpy",
    "set_",
    "storage",
    "swap_tensors",
    "to_dlpack",
    "untyped_storage",
    "vector_to_parameters",
}
# What follows `.data` where it is only read: results with memory of their own, and plain values.
_READERS = {
    *("abs", "clone", "device", "dim", "dtype", "item", "max", "mean", "min", "norm", "numel"),
    *("shape", "size", "std", "sum", "tolist", "var"),
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CALLED = {"__call__", "__enter__", "__exit__", "forward"}  # without their names in code
_NAMES = ("LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")
_CODES_MAX = 2_000  # of libraries


def writes_unversioned(code: types.CodeType) -> bool:
    """Return whether `code` itself may write through `.data` or another way past the counter."""
    names = [
        (each.opname, each.argval) for each in dis.get_instructions(code) if each.opname != "CACHE"
    ]
    for index, (kind, name) in enumerate(names):
        if kind == "STORE_ATTR" and name == "data":
            return True
        if kind in _NAMES and name in _WRITERS:
            return True
        if kind in ("LOAD_ATTR", "LOAD_METHOD"):
            if name in _WRITERS:
                return True
            if name == "data" and not _is_read(names, index):
                return True
        if name in ("getattr", "setattr") and kind in _NAMES and "data" in code.co_consts:
            return True
    return False


def _is_read(names: list[tuple[str, Any]], index: int) -> bool:
    """Return whether the `.data` at `index` is a gradient's, or is only read."""
    before = names[index - 1] if index else ("", "")
    after = names[index + 1] if index + 1 < len(names) else ("", "")
    is_gradient = before[0] == "LOAD_ATTR" and before[1] == "grad"
    return is_gradient or (after[0] in ("LOAD_ATTR", "LOAD_METHOD") and after[1] in _READERS)


def can_write_unversioned(
    codes: Iterable[types.CodeType], library: Iterable[Any], modules: Iterable[nn.Module]
) -> bool:
    """Return whether a phase can write past the counter.

    `codes`: the script's own code that it can run. `library`: values of libraries that this code
    can reach. `modules`: the protected modules, with their submodules.
    """
    parts = list(modules)
    codes = [*codes, *_codes_of_hooks(parts)]
    if any(map(writes_unversioned, codes)):
        return True
    named = _CALLED.union(*(names_of(code).attributes for code in codes))
    kinds = {type(value) for value in (*library, *parts)}
    functions = [value for value in library if isinstance(value, types.FunctionType)]
    return any(map(writes_unversioned, _codes_of_libraries(kinds, functions, named)))


def _codes_of_hooks(parts: Iterable[nn.Module]) -> Iterator[types.CodeType]:
    for part in parts:
        tables = [vars(part).get(name) for name in _HOOKS]
        for parameter in part.parameters(recurse=False):
            tables += [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]  # noqa: SLF001 - torch has no other list of them
        for table in tables:
            for hook in (table or {}).values():
                yield from _codes_of(hook)


def _codes_of(value: Any) -> Iterator[types.CodeType]:
    """Return the code of a function, or of an object that can be called; torch's own apart."""
    function = unwrapped(getattr(value, "__func__", value))
    if not isinstance(function, types.FunctionType) and callable(function):
        function = type(value).__call__
    if isinstance(function, types.FunctionType) and _counts(function.__module__):
        yield function.__code__
        yield from nested(function.__code__)


def _codes_of_libraries(
    kinds: Iterable[type], functions: Iterable[Callable[..., Any]], named: set[str] | frozenset[str]
) -> Iterator[types.CodeType]:
    """Return code of libraries: methods whose names are among `named`, and what they name."""
    bases = {base for kind in kinds for base in kind.__mro__ if _counts(base.__module__)}
    bases = {base for base in bases if not _is_own(base.__module__)}
    todo = [*functions, *_methods(bases, named)]
    visited, known = set[int](), set(named)
    while todo and len(visited) < _CODES_MAX:
        function = unwrapped(todo.pop())
        if not isinstance(function, types.FunctionType) or not _counts(function.__module__):
            continue
        if id(function.__code__) in visited:
            continue
        visited.add(id(function.__code__))
        for code in (function.__code__, *nested(function.__code__)):
            yield code
            names = names_of(code)
            todo += [function.__globals__.get(name) for name in names.outer]
            new = names.attributes - known
            known |= new
            todo += _methods(bases, new)


def _methods(bases: Iterable[type], named: Iterable[str]) -> Iterator[Any]:
    wanted = set(named)
    for base in bases:
        for name, member in vars(base).items():
            if name in wanted:
                yield getattr(member, "__func__", getattr(member, "fget", member))


def _counts(module: str | None) -> bool:
    """Return whether code of this module may write weights: not torch's, Python's or Outlast's."""
    top = (module or "").partition(".")[0]
    return top not in ("torch", "numpy", "outlast") and top not in sys.stdlib_module_names


def _is_own(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (isinstance(file, str) and is_own_file(file))
