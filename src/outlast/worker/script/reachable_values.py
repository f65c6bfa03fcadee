"""Values that code can reach, with a fingerprint of each."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from outlast.worker.script.bytecode import CodeNames, names_of, nested
from outlast.worker.script.value_encoding import CONTAINERS, PLAIN, is_reference, written
from outlast.worker.script.value_fingerprints import (
    ITEMS_MAX,
    look_of,
    scripted_values,
    slot_values,
)
from outlast.worker.script.value_paths import (
    CACHED_FUNCTION,
    Path,
    Step,
    functions_of,
    is_own_class,
    is_own_file,
    layers,
    text,
    unbound_attributes,
    unwrapped,
)

_VALUES_MAX = 20_000  # visited in one walk
_OF_EVERY_OPTIMIZER = {"param_groups", "state", "defaults"}
_PROTECTED = "protected"
_OF_LIBRARIES = {*vars(nn.Module()), "_zero_grad_profile_name"}
# Dicts of hooks on a module, a parameter or an optimizer; no code names the hooks in them.
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_post_accumulate_grad_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)
# Attributes of pipeline schedules and stages that hold the script's functions and modules.
_OF_PIPELINES = ("_loss_fn", "_stage", "_stages", "submod")
_MUTABLE = (list, dict, set, deque, torch.Tensor, np.ndarray)


class ValueSpot(NamedTuple):
    """A value at a path; the reference keeps its id from being reused."""

    value: Any
    saved: bytes | None  # encoded; None if it is too large or of another type
    look: Any  # fingerprint: equal while the value seems unchanged

    @property
    def is_plain(self) -> bool:
        """Return whether the value could be saved as plain data."""
        return self.saved is not None

    @property
    def is_protected(self) -> bool:
        """Return whether the value is protected state."""
        return type(self.look) is tuple and self.look[0] == _PROTECTED

    @property
    def is_carriable(self) -> bool:
        """Return whether another process can obtain the value: as plain data or by its name."""
        return self.saved is not None or is_reference(self.value)


class ReachableCode(NamedTuple):
    """Code of the script that may run, with its names and its globals."""

    code: types.CodeType
    names: CodeNames
    space: dict[str, Any]


class ReachableValues:
    """Values that a set of functions and names may reach.

    `skip`: ids of protected objects, of which only plain attributes of modules are visited;
    `without`: paths that are bound again before they are read.
    """

    def __init__(self, skip: set[int], without: frozenset[Path] = frozenset()) -> None:
        self._skip, self._without = skip, without
        self.codes: list[ReachableCode] = []
        self._seen_code: set[int] = set()
        self._modules: list[types.ModuleType] = []
        self._visited: set[int] = set()
        self._looks: dict[int, Any] = {}  # of values with several paths, by id
        self._todo: deque[tuple[Path, Any]] = deque()
        self._owners: list[tuple[Path, Any]] = []  # of attributes that code may set
        self.spots: dict[Path, ValueSpot] = {}
        self.caches: dict[str, Any] = {}
        self.called: list[Any] = []  # protected objects; functions and objects of libraries
        self.methods: dict[int, str] = {}  # names of the script's methods, by id of their code
        self.direct: set[int] = set()  # ids of the code of functions that are values
        self.constants: set[str] = set()  # strings in code

    def add_code(
        self, code: types.CodeType, space: dict[str, Any], offsets: frozenset[int] | None = None
    ) -> None:
        """Add code that may run (its instructions at `offsets`), and the names that it uses."""
        self._add_one(code, space, names_of(code, offsets))
        for inner in nested(code, offsets):
            if id(inner) not in self._seen_code:
                self._add_one(inner, space, names_of(inner))

    def add(self, path: Path, value: Any) -> None:
        """Add a value to visit, unless `path` is in `without`."""
        if path not in self._without:
            self._todo.append((path, value))

    def walk(self) -> None:
        """Visit all values breadth-first, then attributes that only names in code lead to.

        These are private attributes of the script's modules and optimizers, and on objects of
        libraries plain attributes that code sets (`dropout.p`, `args.scale`), and containers and
        tensors that code names (`p.average`, `args.losses`).
        """
        self._walk()
        while self._owners and len(self.spots) < _VALUES_MAX:
            names = [each.names for each in self.codes]
            stored = frozenset[str]().union(*(each.stored_attributes for each in names))
            named = stored.union(*(each.attributes for each in names))
            owners, self._owners = self._owners, []
            for path, owner in owners:
                is_loader = isinstance(owner, DataLoader)
                is_own = is_own_class(type(owner)) and not is_loader
                is_optimizer = isinstance(owner, torch.optim.Optimizer)
                apart = _OF_EVERY_OPTIMIZER if is_optimizer else _OF_LIBRARIES
                for name in sorted((named & vars(owner).keys()) - apart):
                    value = vars(owner)[name]
                    is_state = type(value) in PLAIN and name in stored
                    is_state |= is_loader and name.endswith("sampler") and "set_epoch" in named
                    if is_own or is_state or isinstance(value, _MUTABLE):
                        self.add((*path, ("attr", name)), value)
            self._walk()

    def late_names(self) -> set[Path]:
        """Return the paths of unbound attributes and globals that reached code may bind."""
        found = {
            (("module", each.space["__name__"]), ("name", name))
            for each in self.codes
            if "__name__" in each.space
            for name in each.names.stored_globals - each.space.keys()
        }
        stored_on: dict[str, set[str]] = {}
        for owner, name in frozenset[tuple[str, str]]().union(
            *(each.names.stored_on for each in self.codes)
        ):
            stored_on.setdefault(owner, set()).add(name)
        for path, spot in self.spots.items():
            if isinstance(getattr(spot.value, "__dict__", None), dict):
                names = unbound_attributes(spot.value, stored_on.get(str(path[-1][1]), ()))
                found |= {(*path, ("attr", name)) for name in names}
        return found

    def taken_from(self) -> frozenset[str]:
        """Return the names whose `get` reached code calls, `run` of a thread apart."""
        names = (each.names.taken_from for each in self.codes if each.code.co_name != "run")
        return frozenset[str]().union(*names)

    def _walk(self) -> None:
        while self._todo and len(self.spots) < _VALUES_MAX:
            path, value = self._todo.popleft()
            if path not in self.spots:
                self._visit(path, value)

    # --- code ---

    def _add_one(self, code: types.CodeType, space: dict[str, Any], names: CodeNames) -> None:
        self._seen_code.add(id(code))
        self.codes.append(ReachableCode(code, names, space))
        self.constants.update(each for each in code.co_consts if type(each) is str)
        self._add_globals(space, names.outer | names.stored_globals)
        for module in self._modules:
            self._add_globals(vars(module), names.attributes | names.stored_attributes)

    def _add_module(self, module: types.ModuleType) -> None:
        if is_own_file(getattr(module, "__file__", None) or "<frozen") and module not in (
            self._modules
        ):
            self._modules.append(module)
            for each in self.codes:
                names = each.names.attributes | each.names.stored_attributes
                self._add_globals(vars(module), names)

    def _add_globals(self, space: dict[str, Any], names: Iterable[str]) -> None:
        module = space.get("__name__", "")
        for name in sorted(names):
            if name in space and not name.startswith("__"):
                self.add((("module", module), ("name", name)), space[name])

    def _add_function(self, path: Path, function: types.FunctionType) -> None:
        if not is_own_file(function.__code__.co_filename):
            self.called.append(function)
            return
        if id(function.__code__) not in self._seen_code:
            self.add_code(function.__code__, function.__globals__)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=False
        ):
            try:
                self.add((*path, ("cell", name)), cell.cell_contents)
            except ValueError:  # not bound yet
                continue
        for index, value in enumerate(function.__defaults__ or ()):
            self.add((*path, ("default", index)), value)
        for name, value in vars(function).items():
            if name != "__wrapped__":
                self.add((*path, ("attr", name)), value)

    def _add_class(self, path: Path, kind: type) -> None:
        for base in kind.__mro__:
            if not is_own_class(base):
                continue
            for name, member in vars(base).items():
                for function in functions_of(member):
                    place = (*path, ("attr", name))
                    self._add_cache(place, function)
                    inner = unwrapped(function)
                    for steps, layer in layers(function) if name != "__init__" else ():
                        if layer is not inner and not is_own_file(layer.__code__.co_filename):
                            continue  # a library's wrapper
                        count = len(self.codes)
                        self._add_function((*place, *steps), layer)
                        self.methods.update((id(each.code), name) for each in self.codes[count:])

    def _add_cache(self, path: Path, function: Any) -> None:
        """Record a function of the script whose results `functools.lru_cache` keeps."""
        if isinstance(function, CACHED_FUNCTION):
            code = getattr(unwrapped(function), "__code__", None)
            if code is not None and is_own_file(code.co_filename):
                self.caches[text(path)] = function

    def _add_hooks(self, path: Path, owner: Any) -> None:
        """Add the hooks on a module, a parameter or an optimizer."""
        names, is_tensor = vars(owner), isinstance(owner, torch.Tensor)
        for name in _HOOKS:
            hooks = getattr(owner, name, None) if is_tensor else names.get(name)
            for index, hook in enumerate((hooks or {}).values()):
                self.add((*path, ("attr", name), ("item", index)), hook)
        for index, (hook, _) in enumerate(names.get("_comm_hooks", ())):
            self.add((*path, ("attr", "_comm_hooks"), ("key", index), ("key", 0)), hook)

    def _add_parameter(self, path: Path, parameter: nn.Parameter) -> None:
        """Add a parameter's hooks, and the attributes that the script sets on it."""
        self.spots[path] = ValueSpot(parameter, None, (_PROTECTED, id(parameter)))
        if id(parameter) not in self._visited:
            self._visited.add(id(parameter))
            self._owners.append((path, parameter))
            self._add_hooks(path, parameter)

    def _add_optimizer(self, path: Path, optimizer: torch.optim.Optimizer) -> None:
        """Add the attributes and hooks of an optimizer, except for its groups and state."""
        if id(optimizer) in self._visited:
            return
        self._visited.add(id(optimizer))
        self._add_hooks(path, optimizer)
        self._owners.append((path, optimizer))
        if not is_own_class(type(optimizer)):
            return
        self._add_class(path, type(optimizer))
        for name, value in vars(optimizer).items():
            if not name.startswith("_") and name not in _OF_EVERY_OPTIMIZER:
                self.add((*path, ("attr", name)), value)

    # --- values ---

    def _visit(self, path: Path, value: Any) -> None:
        protected = id(value) in self._skip
        if isinstance(value, types.ModuleType) or (protected and not isinstance(value, nn.Module)):
            self.spots[path] = ValueSpot(value, None, (_PROTECTED, id(value)))
            if isinstance(value, types.ModuleType):
                self._add_module(value)
            elif isinstance(value, torch.optim.Optimizer):
                self._add_optimizer(path, value)
            elif isinstance(value, nn.Parameter):
                self._add_parameter(path, value)
            else:
                self.called.append(value)
                self._owners += [(path, value)] if isinstance(value, DataLoader) else []
            return
        saved = written(value)
        if saved is not None:
            self.spots[path] = ValueSpot(value, saved, saved)
            return
        if id(value) not in self._looks:
            self._looks[id(value)] = look_of(value, self._skip)
        self.spots[path] = ValueSpot(value, None, self._looks[id(value)])
        if id(value) in self._visited:
            return
        self._visited.add(id(value))
        for step, inner in self._inside(path, value):
            self.add((*path, step), inner)

    def _inside(self, path: Path, value: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
        if isinstance(value, CONTAINERS):
            yield from _items(value)
        elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
            self._add_bound(path, value)
        elif isinstance(value, CACHED_FUNCTION):
            self._add_cache(path, value)
            if isinstance(wrapped := unwrapped(value), types.FunctionType):
                self._add_function((*path, ("attr", "__wrapped__")), wrapped)
        elif isinstance(value, types.FunctionType):
            self.direct.add(id(value.__code__))
            for steps, layer in layers(value):
                self._add_function((*path, *steps), layer)
        elif isinstance(value, type):
            if is_own_class(value):
                self._add_class(path, value)
                yield from _class_values(value)
        elif isinstance(value, nn.Module):
            yield from self._inside_module(path, value)
        elif is_own_class(type(value)):
            self._add_class(path, type(value))
            yield ("attr", "__class__"), type(value)
            for name, inner in getattr(value, "__dict__", {}).items():
                yield ("attr", name), inner
            yield from slot_values(value)
        elif isinstance(value, ContextVar):
            with suppress(LookupError):
                yield ("context", value.name), value.get()
        elif isinstance(value, partial):
            for name in ("func", "args", "keywords"):
                yield ("attr", name), getattr(value, name)
        elif isinstance(getattr(value, "__dict__", None), dict):
            self.called.append(value)
            self._owners.append((path, value))
            if type(value).__module__.startswith("torch.distributed.pipelining."):
                names = vars(value).keys() & {*_OF_PIPELINES}
                yield from ((("attr", name), vars(value)[name]) for name in sorted(names))

    def _add_bound(self, path: Path, method: types.MethodType | types.BuiltinMethodType) -> None:
        self.add((*path, ("attr", "__self__")), method.__self__)
        function = getattr(method, "__func__", None)
        if isinstance(function, types.FunctionType):
            self.direct.add(id(function.__code__))
            self._add_function(path, function)

    def _inside_module(self, path: Path, module: nn.Module) -> Iterator[tuple[Step, Any]]:
        if is_own_class(type(module)):
            self._add_class(path, type(module))
            yield ("attr", "__class__"), type(module)
            for name, inner in vars(module).items():
                if not name.startswith("_") and name != "training":  # see ProtectedModules.modes
                    yield ("attr", name), inner
        yield from scripted_values(module)
        self._owners.append((path, module))
        self._add_hooks(path, module)
        for name, child in module.named_children():
            yield ("attr", name), child
        if id(module) in self._skip:
            for name, parameter in module.named_parameters(recurse=False):
                self._add_parameter((*path, ("attr", name)), parameter)
        else:
            yield from (
                (("attr", name), tensor)
                for name, tensor in [
                    *module.named_parameters(recurse=False),
                    *module.named_buffers(recurse=False),
                ]
            )


def _class_values(kind: type) -> Iterator[tuple[tuple[str, Any], Any]]:
    """Yield the values in the bodies of a script's class and its bases: counters, lists."""
    for base in kind.__mro__:
        for name, value in vars(base).items() if is_own_class(base) else ():
            if not name.startswith("__") and not hasattr(type(value), "__get__"):
                yield ("attr", name), value


def _items(value: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    if len(value) > ITEMS_MAX:
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(key, (str, int)):
                yield ("key", key), inner
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield ("key", index), inner
