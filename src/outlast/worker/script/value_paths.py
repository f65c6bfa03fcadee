"""Paths to values in a running script, to read and write them; frames of its own code.

A path begins at a root, which every process that runs the same script has, and continues in steps.
Roots and steps are pairs of a kind and a name:

| root | names |
|---|---|
| `module` | a module of the script |
| `frame` | the function that holds the loop, by its qualified name; it is on the stack |
| `phase` | a function given to `session.run`, by its key |
| `process` | `torch`: its modes, items by name; `environment`: variables, by name |

| step | goes to |
|---|---|
| `name` | a global of the module, a local of the frame |
| `attr` | an attribute |
| `key` | an item of a dict, list or tuple |
| `item` | a value of a dict whose keys have no names, by position |
| `cell` | a variable of an enclosing function |
| `default` | the default value of a parameter, by position |
| `context` | the value of a ContextVar |

A frame's variables are written only from the thread that runs it, during a call that it makes. Up
to Python 3.12 `f_locals` is a new copy at each access and is written back as a whole; from 3.13 on
(PEP 667) it writes through.
"""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import nn

from outlast.worker.script.bytecode import is_own_file, names_of
from outlast.worker.script.process_modes import ENVIRONMENT, TORCH_MODES


@cache
def is_own_class(kind: type) -> bool:
    """Return whether the script, or a module beside it, defines this class."""
    if kind.__module__ == "__main__":
        return True
    module = sys.modules.get(kind.__module__)
    name = getattr(module, "__file__", None)
    return isinstance(name, str) and is_own_file(name)


_WRITES_THROUGH = sys.version_info >= (3, 13)
_bring_back = ctypes.pythonapi.PyFrame_LocalsToFast if not _WRITES_THROUGH else None
if _bring_back is not None:
    _bring_back.argtypes, _bring_back.restype = (ctypes.py_object, ctypes.c_int), None


# Where a script waits for another stack of its thread, and generators around its batches, which
# wait until the loop draws again.
suspended: list[types.FrameType] = []


def own_frames() -> Iterator[types.FrameType]:
    """Yield the frames of the script's own code on this thread's stacks, innermost first."""
    for top in (sys._getframe(1), *suspended):  # noqa: SLF001 - no other access to a script's locals
        frame: types.FrameType | None = top
        while frame is not None:
            if is_own_file(frame.f_code.co_filename):
                yield frame
            frame = frame.f_back


def bind_local(frame: types.FrameType, name: str, value: Any) -> None:
    """Bind a local variable of a frame, or one that inner functions share."""
    frame.f_locals[name] = value
    if _bring_back is not None:
        _bring_back(frame, 0)


def names_in(frame: types.FrameType) -> set[str]:
    """Return the names of the local variables that are bound now."""
    return set(frame.f_locals)  # its keys() is a list from 3.13 on


Step = tuple[str, Any]
Path = tuple[Step, ...]


class PathGone(LookupError):  # noqa: N818 - control flow: there is nothing at a path
    """Error of a path that leads to no value at present."""


class PathRoots:
    """Roots of paths in this process."""

    def __init__(self) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}  # by a phase's key
        self.made_anew: set[str] = set()  # of phases whose function is another one each time

    def begin_phase(self, key: str, function: Callable[..., Any]) -> None:
        """Note the function of the next phase."""
        known = self.functions.get(key, function)
        if unwrapped(known) is not unwrapped(function) or _self(known) is not _self(function):
            self.made_anew.add(key)
        self.functions[key] = function

    def read(self, path: Path, spaces: dict[Step, Any] | None = None) -> Any:
        """Return the value at `path`. Raises PathGone. `spaces` caches roots across calls."""
        root = path[0]
        if spaces is None or len(path) == 1:
            value = self._root(root)
        elif root in spaces:
            value = spaces[root]
        else:
            value = self._root(root)
            value = value.f_locals if isinstance(value, types.FrameType) else value
            spaces[root] = value
        for step in path[1:]:
            value = _follow(value, step)
        return value

    def write(self, path: Path, value: Any) -> None:
        """Bind `value` at `path`. Raises PathGone if its owner does not exist."""
        owner, (kind, name) = self.read(path[:-1]), path[-1]
        if kind == "name" and isinstance(owner, types.FrameType):
            bind_local(owner, name, value)
        elif kind == "name":
            owner.__dict__[name] = value
        elif kind == "attr":
            setattr(owner, name, value)
        elif kind == "key":
            owner[name] = value
        elif kind == "context":
            owner.set(value)
        elif kind == "cell":
            _cell(owner, name).cell_contents = value
        else:
            raise PathGone(text(path))

    def is_unbound(self, path: Path) -> bool:
        """Return whether the owner exists but has no value of the name at `path`. Of an object only
        its own attributes count, not those of its class."""
        try:
            names, owner = self._names_of_owner(path), self.read(path[:-1])
        except PathGone:
            return False
        return names is not None and not (path[-1][1] in names or _has(owner, path[-1][1]))

    def unbind(self, path: Path) -> None:
        """Unbind the name at `path` in its owner. Raises PathGone if the owner does not exist."""
        names, name, owner = self._names_of_owner(path), path[-1][1], self.read(path[:-1])
        if isinstance(names, dict) and name in names:
            del names[name]
        elif isinstance(owner, type):
            for base in owner.__mro__:
                if name in vars(base) and is_own_class(base):
                    type.__delattr__(base, name)
        elif path[-1][0] == "attr" and _is_slot(owner, name) and hasattr(owner, name):
            object.__delattr__(owner, name)

    def _names_of_owner(self, path: Path) -> Mapping[str, Any] | None:
        """Return the namespace of an object, a class or a module; None for other owners."""
        kind, owner = path[-1][0], self.read(path[:-1])
        if kind == "name" and isinstance(owner, types.FrameType):
            return owner.f_locals  # `unbind` has no effect: a loop's code does not run again
        is_one = isinstance(owner, types.ModuleType) if kind == "name" else kind == "attr"
        names = getattr(
            owner, "__dict__", {} if kind == "attr" and _is_slot(owner, path[-1][1]) else None
        )
        return names if is_one and isinstance(names, Mapping) else None

    def place(self, path: Path) -> tuple[Any, ...] | None:
        """Return an identity of the variable at `path`, equal for all paths that lead to it; None
        if there is none."""
        try:
            owner, (kind, name) = self.read(path[:-1]), path[-1]
            if kind == "name" and isinstance(owner, types.FrameType):
                return "cell", f"{owner.f_code.co_qualname}.<locals>", name
            if kind == "cell":
                return "cell", _definer(_with_cell(owner, name), name), name
            return id(owner), kind, name
        except (PathGone, AttributeError):
            return None

    def _root(self, root: Step) -> Any:
        kind, name = root
        if kind == "module" and name in sys.modules:
            return sys.modules[name]
        if kind == "phase" and name in self.functions:
            return self.functions[name]
        if kind == "process":
            return TORCH_MODES if name == "torch" else ENVIRONMENT
        if kind == "frame":
            for frame in own_frames():
                if frame.f_code.co_qualname == name:
                    return frame
        raise PathGone(f"{kind} {name}")


def _has(owner: Any, name: str) -> bool:
    """Return whether an object has a value of its own outside of `__dict__`: a parameter, a buffer
    or a child of a module, an attribute of TorchScript, a value in `__slots__`."""
    if isinstance(owner, nn.Module):
        tables = (owner._parameters, owner._buffers, owner._modules)  # noqa: SLF001 - no copies
        if any(name in table for table in tables):
            return True
    is_scripted = isinstance(owner, torch.jit.ScriptModule)
    if isinstance(owner, type):
        return any(name in vars(base) for base in owner.__mro__)
    return (is_scripted or _is_slot(owner, name)) and hasattr(owner, name)


def _is_slot(owner: Any, name: str) -> bool:
    return isinstance(getattr(type(owner), name, None), types.MemberDescriptorType)


def root_of(frame: types.FrameType) -> Step:
    """Return the root of the names that code in `frame` binds."""
    if frame.f_code.co_name == "<module>":
        return "module", frame.f_globals["__name__"]
    return "frame", frame.f_code.co_qualname


_SHOWN = {
    "name": "{}",
    "cell": ".{}",
    "attr": ".{}",
    "default": "<default {}>",
    "context": ".get()",
}


def text(path: Path) -> str:
    """Return the path as in the script's source: `meter.total`, `best (of main())`."""
    (kind, root), *steps = path
    shown = (_SHOWN.get(step, "[{!r}]").format(name) for step, name in steps)
    dotted = "".join(shown).removeprefix(".")
    if kind == "process":
        owner = "torch" if root == "torch" else "the environment"
        return f"{owner}'s {steps[-1][1]}"
    if kind == "frame":
        return f"{dotted} (of {root}())"
    if kind == "phase":
        return f"{dotted} (of {root.partition(':')[0]})"
    return dotted if root == "__main__" else f"{root}.{dotted}"


def described(path: Path, value: Any) -> str:
    """Return the path and the class of a value that is not protected, for a message."""
    return f"{text(path)} ({type(value).__name__}), which is not protected"


CACHED_FUNCTION: type = type(cache(lambda: None))  # of functools.lru_cache; not public
WRAPPERS = (types.FunctionType, CACHED_FUNCTION)


def unwrapped(function: Any) -> Any:
    """Return the Python function behind partials, wrappers and bound methods."""
    while True:
        if isinstance(function, partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif isinstance(function, WRAPPERS) and "__wrapped__" in vars(function):
            function = vars(function)["__wrapped__"]
        else:
            return function


def layers(function: Any) -> Iterator[tuple[Path, types.FunctionType]]:
    """Yield the Python functions behind partials and bound methods, from the outermost wrapper
    (`functools.wraps`) to the innermost function, with the steps that lead to each."""
    steps: Path = ()
    while True:
        if isinstance(function, partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        else:
            if isinstance(function, types.FunctionType):
                yield steps, function
            if not (isinstance(function, WRAPPERS) and "__wrapped__" in vars(function)):
                return
            steps, function = (*steps, ("attr", "__wrapped__")), vars(function)["__wrapped__"]


def _with_cell(function: Any, name: str) -> types.FunctionType:
    """Return the outermost layer of a function that has a variable of a closure."""
    for _, layer in layers(function):
        if name in layer.__code__.co_freevars:
            return layer
    raise PathGone(f"cell {name}")


def _self(function: Any) -> Any:
    """Return the object of a bound method, also behind partials."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__self__", None)


def _follow(value: Any, step: Step) -> Any:
    kind, name = step
    try:
        if kind == "name":
            if isinstance(value, types.FrameType):
                return value.f_locals[name]
            return (value.__dict__ if isinstance(value, types.ModuleType) else value)[name]
        if kind == "attr":
            return getattr(value, name)
        if kind == "key":
            return value[name]
        if kind == "item":
            return list(value.values())[name]
        if kind == "context":
            return value.get()
        if kind == "cell":
            return _cell(value, name).cell_contents
        if kind == "default":
            return value.__defaults__[name]
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        raise PathGone(f"{kind} {name}") from error
    raise PathGone(f"{kind} {name}")


def _definer(function: Any, name: str) -> str:
    """Return the scope that defines variable `name` of a closure, or the id of its cell."""
    for frame in own_frames():
        scope = f"{frame.f_code.co_qualname}.<locals>"
        if name in frame.f_code.co_cellvars and function.__qualname__.startswith(f"{scope}."):
            return scope
    return str(id(_cell(function, name)))


def _cell(function: Any, name: str) -> types.CellType:
    layer = _with_cell(function, name)
    return (layer.__closure__ or ())[layer.__code__.co_freevars.index(name)]


@cache
def attributes_stored_by(kind: type) -> frozenset[str]:
    """Return the attributes that script-defined methods store, except for constructors."""
    functions = (
        unwrapped(function)
        for base in kind.__mro__
        if is_own_class(base)
        for name, member in vars(base).items()
        if name != "__init__"
        for function in functions_of(member)
    )
    codes = [each.__code__ for each in functions if isinstance(each, types.FunctionType)]
    return frozenset[str]().union(*(names_of(code).stored_attributes for code in codes))


def unbound_attributes(value: Any, stored: Iterable[str]) -> set[str]:
    """Return the attributes that a value lacks, and that script code may bind: methods of its
    class, its cached properties, and `stored`, by code that stores them on a variable of its name.
    """
    kind, names = type(value), set(stored)
    if isinstance(value, (types.ModuleType, torch.Tensor)):
        return set()
    defaults = {name for name in names if not hasattr(getattr(kind, name, None), "__set__")}
    if is_own_class(kind):
        missing = {name for name in attributes_stored_by(kind) if not hasattr(kind, name)}
        defaults |= missing | set(cached_properties(kind))
    return {name for name in defaults if name not in vars(value) and not _has(value, name)}


def functions_of(member: Any) -> tuple[Any, ...]:
    """Return the functions behind a member of a class: all three of a property."""
    if isinstance(member, property):
        return tuple(each for each in (member.fget, member.fset, member.fdel) if each is not None)
    if isinstance(member, cached_property):
        return (member.func,)
    return (getattr(member, "__func__", member),)


def cached_properties(kind: type) -> list[str]:
    """Return the names of cached properties of a class of the script."""
    members = (item for base in kind.__mro__ if is_own_class(base) for item in vars(base).items())
    return [name for name, member in members if isinstance(member, cached_property)]
