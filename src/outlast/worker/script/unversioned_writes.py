"""Detection of code that can write a tensor's memory past torch's version counter.

`parameter.data.add_(...)`, a NumPy view of a parameter, and raw memory access do not change the
counter. Such code is detected in the bytecode that a phase can run: the script's own functions,
hooks of its modules, and methods of library classes that these functions name (an EMA's `copy_to`,
a layer's `forward`). Optimizers step after the vote and do not count; nor does torch's own code,
except for the functions in `_WRITERS`.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from outlast.worker.script.bytecode import names_of, nested
from outlast.worker.script.reachable_values import ReachableValues
from outlast.worker.script.value_paths import unwrapped

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
# Attributes of `.data` that only read it: their results are new tensors or plain values.
_READERS = {
    *("abs", "clone", "device", "dim", "dtype", "item", "max", "mean", "min", "norm", "numel"),
    *("shape", "size", "std", "sum", "tolist", "var"),
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CALLED = {"__call__", "__enter__", "__exit__", "forward"}  # without being named in code
_NAMES = ("LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")
_CODES_MAX = 5_000  # examined for one function


def writes_unversioned(code: types.CodeType) -> bool:
    """Return whether `code` itself may write past the counter, by `.data` or otherwise."""
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


def can_write_unversioned(reach: ReachableValues, modules: Iterable[nn.Module]) -> bool:
    """Return whether a phase can write past the counter.

    `reach`: values and code that its function can reach. `modules`: all protected submodules.
    """
    parts = list(modules)
    codes, kinds = list(_codes_of_hooks(parts)), {type(part) for part in parts}
    functions: list[types.FunctionType] = []
    for value in reach.called:
        if isinstance(value, types.FunctionType):
            functions.append(value)
        elif not isinstance(value, Optimizer):
            kinds.add(type(value))
    for each in reach.codes:
        if id(each.code) in reach.direct:
            codes += [each.code, *nested(each.code)]
        elif id(each.code) not in reach.methods:
            codes.append(each.code)
    return any(map(writes_unversioned, codes)) or _can_named(codes, reach, kinds, functions)


def _can_named(
    codes: Iterable[types.CodeType],
    reach: ReachableValues,
    kinds: Iterable[type],
    functions: Iterable[types.FunctionType],
) -> bool:
    """Return whether `functions`, methods named in `codes`, or code that these name can write.

    Excludes methods that only a constructor names (`init_weights`) and methods of optimizers. More
    than _CODES_MAX code objects count as code that can write.
    """
    bases = {base for kind in kinds for base in kind.__mro__ if _counts(base.__module__)}
    own: dict[str, list[types.CodeType]] = {}
    stepping = _codes_of_optimizers(reach)
    for each in reach.codes:
        name = reach.methods.get(id(each.code), "")
        if name and id(each.code) not in stepping:
            own.setdefault(name, []).append(each.code)
    known = _CALLED.union(*(names_of(code).attributes for code in codes))
    todo: list[Any] = [*functions, *_methods(bases, known)]
    plain = [code for name in known | _dunders(own) for code in own.get(name, ())]
    visited = set[int]()
    while todo or plain:
        if len(visited) > _CODES_MAX:
            return True
        if plain:
            found = [plain.pop()]
            space: dict[str, Any] = {}
        else:
            function = unwrapped(todo.pop())
            if not isinstance(function, types.FunctionType) or not _counts(function.__module__):
                continue
            found = [function.__code__, *nested(function.__code__)]
            space = function.__globals__
        for code in found:
            if id(code) in visited:
                continue
            visited.add(id(code))
            if writes_unversioned(code):
                return True
            names = names_of(code)
            todo += [space[name] for name in names.outer if name in space]
            new = names.attributes - known
            known = known | new
            todo += _methods(bases, new)
            plain += [each for name in new for each in own.get(name, ())]
    return False


def _codes_of_optimizers(reach: ReachableValues) -> set[int]:
    """Return the ids of the code of optimizers' methods, which run after the vote."""
    kinds = {type(s.value) for s in reach.spots.values() if isinstance(s.value, Optimizer)}
    members = [
        unwrapped(getattr(member, "__func__", getattr(member, "fget", member)))
        for kind in kinds
        for base in kind.__mro__
        for member in vars(base).values()
    ]
    functions = [each for each in members if isinstance(each, types.FunctionType)]
    return {id(code) for f in functions for code in (f.__code__, *nested(f.__code__))}


def _dunders(names: Iterable[str]) -> set[str]:
    return {name for name in names if name.startswith("__")}


def _codes_of_hooks(parts: Iterable[nn.Module]) -> Iterator[types.CodeType]:
    for part in parts:
        tables = [vars(part).get(name) for name in _HOOKS]
        for parameter in part.parameters(recurse=False):
            tables += [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]  # noqa: SLF001 - torch has no other list of them
        for table in tables:
            for hook in (table or {}).values():
                yield from _codes_of(hook)


def _codes_of(value: Any) -> Iterator[types.CodeType]:
    """Yield the code of a function or a callable object, except for torch's own."""
    function = unwrapped(getattr(value, "__func__", getattr(value, "func", value)))
    if not isinstance(function, types.FunctionType) and callable(function):
        function = type(value).__call__
    if isinstance(function, types.FunctionType) and _counts(function.__module__):
        yield function.__code__
        yield from nested(function.__code__)


def _methods(bases: Iterable[type], named: Iterable[str]) -> Iterator[Any]:
    wanted = set(named)
    for base in bases:
        for name, member in vars(base).items():
            if name in wanted:
                yield getattr(member, "__func__", getattr(member, "fget", member))


def _counts(module: str | None) -> bool:
    """Return whether code of this module is examined: not torch, NumPy, Python or Outlast."""
    top = (module or "").partition(".")[0]
    return top not in ("torch", "numpy", "outlast") and top not in sys.stdlib_module_names
