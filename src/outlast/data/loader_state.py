"""State of a loader's objects: generators and plain attributes that change.

A dataset may draw from `self.rng`, count its items, or create its generator with the first item; a
sampler may count its epochs. A replacement process needs all changes since construction. The
search covers attributes, containers, closures and module globals within limits: long containers
are skipped, since they hold data.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader

from outlast import random_state
from outlast.errors import UsageError
from outlast.random_state import GENERATOR_TYPES

_DEPTH_MAX = 6
_WIDTH_MAX = 64  # longer containers hold data, not state
_TEXT_MAX = 1024
_BYTES_MAX = 16 << 10  # of one tensor or array
_MOVES_MAX = 2
_VISITS_MAX = 2000
_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_LEAVES = (
    *_SCALARS,
    bytearray,
    type,
    ModuleType,
    torch.Tensor,
    torch.dtype,
    torch.device,
    np.ndarray,
    np.generic,
    random.SystemRandom,
    torch.nn.Module,
    torch.optim.Optimizer,
)
# Parts of a stream of Hugging Face begin anew with each iteration; until then they have no state.
_UNSETTABLE = (
    *("torch.", "torchdata.", "outlast.", "datasets."),
    *("threading", "multiprocessing.", "logging"),
)
_ABSENT = ("absent",)


class _Spot(NamedTuple):
    parent: Any
    name: Any
    value: Any


class LoaderState:
    """Generators and plain attributes below `roots` that have changed since construction.

    `apart` and all objects below it are excluded. `modules`: include generators in module globals.
    `attributes`: False for objects whose `state_dict` covers them: only generators are included.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        *,
        apart: Any = None,
        modules: bool = True,
        attributes: bool = True,
    ) -> None:
        self._roots, self._apart = roots, apart
        self._modules, self._attributes = modules, attributes
        self._large: dict[str, tuple[Any, int]] = {}  # tensors and arrays, with their version
        self._first = self._values()
        self._changed: set[str] = set()
        self._moves: dict[str, int] = {}

    def changes(self) -> dict[str, Any]:
        """Return all changes since construction, by path, as plain data."""
        large = self._large
        values = self._values()
        self._refuse_large(large)
        self._changed |= {
            path
            for path, value in values.items()
            if not random_state.same(value, self._first.get(path, _ABSENT))
        }
        return {path: values[path] for path in sorted(self._changed) if path in values}

    def generators(self) -> dict[str, random_state.Generator]:
        """Return the current generators, by path."""
        spots, _ = self._scan()
        return {
            path: spot.value
            for path, spot in spots.items()
            if isinstance(spot.value, GENERATOR_TYPES)
        }

    def put(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that `changes` returned as `saved`.

        Raises UsageError if this process has no parent object for a path.
        """
        self.changes()
        spots, places = self._scan()
        wanted = {path: self._first[path] for path in self._changed if path in self._first}
        for path, value in {**wanted, **saved}.items():
            spot = spots.get(path)
            if spot is None:
                above, _, name = path.rpartition("/")
                if not above and _make_global(path, value):
                    continue
                if above not in places:
                    raise UsageError(
                        f"{path.replace('/', '.')} was created while the run loaded data, and does"
                        " not exist in this process: create it where the object is built, or in"
                        " worker_init_fn"
                    )
                spot = _Spot(places[above], name, None)
            _put(spot, value)
        self._changed |= set(saved)

    def _refuse_large(self, before: dict[str, tuple[Any, int]]) -> None:
        for path, (thing, version) in self._large.items():
            old = before.get(path)
            if old is None or (old[0] is thing and old[1] == version):
                continue
            self._moves[path] = self._moves.get(path, 0) + 1
            if self._moves[path] == _MOVES_MAX:
                raise UsageError(
                    f"{path.replace('/', '.')} ({thing.nbytes} bytes) changes from batch to batch,"
                    " and is too large to save with the loader state: return it in the batch"
                    " only, without storing it, or store indices instead"
                )

    def _values(self) -> dict[str, Any]:
        return {path: _written(spot.value) for path, spot in self._scan()[0].items()}

    def _scan(self) -> tuple[dict[str, _Spot], dict[str, Any]]:
        spots: dict[str, _Spot] = {}
        self._large = {}
        places: dict[str, Any] = {}
        visited = {id(self._apart), *_of_the_process()}

        def visit(path: str, spot: _Spot, depth: int, is_settable: bool) -> None:
            thing = spot.value
            kind = type(thing)
            if is_settable and (_is_plain(thing) or _is_small_array(thing)):
                spots[path] = spot
            elif is_settable and kind in (torch.Tensor, np.ndarray):
                self._large[path] = (thing, getattr(thing, "_version", 0))
            if _is_leaf(kind) or id(thing) in visited or len(visited) > _VISITS_MAX:
                return
            visited.add(id(thing))
            if _is_generator(kind):
                spots[path] = spot
            elif depth < _DEPTH_MAX:
                if self._attributes and _has_state_dict(kind):
                    spots[f"{path}/state"] = _Spot(thing, "", thing)
                places[path] = thing
                ours = self._attributes and _is_settable(kind)
                for name, child in _children(thing):
                    visit(f"{path}/{name}", _Spot(thing, name, child), depth + 1, ours)

        for name, root in self._roots.items():
            visit(name, _Spot(None, name, root), 0, False)
        if self._modules:
            for name, generator in module_generators().items():
                if id(generator) not in visited:
                    spots[name] = _Spot(None, name, generator)
        return spots, places


def module_generators() -> dict[str, random_state.Generator]:
    """Return generators in module globals by "module:name", except the process's own.

    The script and its modules may bind new generators at any time, libraries only at import.
    """
    own, others = _libraries(len(sys.modules))
    return others | {place: value for name in own for place, value in _at_top(name)}


@cache
def _libraries(_modules: int) -> tuple[list[str], dict[str, random_state.Generator]]:
    """Return the names of the script's own modules, and the generators of all others."""
    standard = str(Path(random.__file__).parent)
    own = [
        name
        for name, module in list(sys.modules.items())
        if isinstance(file := getattr(module, "__file__", None), str)
        and "/site-packages/" not in file
        and not file.startswith(standard)
        and not name.startswith("outlast.")
    ]
    others = sys.modules.keys() - {*own}
    return own, {place: value for name in sorted(others) for place, value in _at_top(name)}


def _at_top(module: str) -> list[tuple[str, random_state.Generator]]:
    space = list(getattr(sys.modules.get(module), "__dict__", {}).items())
    generators = [
        (f"{module}:{name}", value) for name, value in space if _is_generator(type(value))
    ]
    return [(place, value) for place, value in generators if id(value) not in _of_the_process()]


@cache
def _of_the_process() -> frozenset[int]:
    """Return the ids of the process's generators, which are saved separately."""
    own = (
        torch.default_generator,
        getattr(random, "_inst", None),
        getattr(np.random.mtrand, "_rand", None),
    )
    return frozenset(map(id, own))


@cache
def _is_leaf(kind: type) -> bool:
    return issubclass(kind, _LEAVES)


@cache
def _is_generator(kind: type) -> bool:
    return issubclass(kind, GENERATOR_TYPES) and not issubclass(kind, random.SystemRandom)


@cache
def _has_state_dict(kind: type) -> bool:
    return _is_settable(kind) and all(
        callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict")
    )


@cache
def _is_settable(kind: type) -> bool:
    return kind is BatchSampler or not (
        f"{kind.__module__}.".startswith(_UNSETTABLE)
        or issubclass(kind, DataLoader)
        or kind in (list, tuple, dict, deque, set, FunctionType, MethodType, partial)
    )


def _children(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, dict):
        items = list(thing.items()) if len(thing) <= _WIDTH_MAX else []
        yield from ((str(key), child) for key, child in items)
    elif isinstance(thing, list | tuple):
        yield from ((str(i), child) for i, child in enumerate(thing[: _WIDTH_MAX + 1]))
    elif isinstance(thing, MethodType):
        yield from (("__self__", thing.__self__), ("__func__", thing.__func__))
    elif isinstance(thing, FunctionType):
        yield from _of_function(thing)
    elif isinstance(thing, partial):
        yield from (("args", thing.args), ("keywords", thing.keywords), ("func", thing.func))
    else:
        yield from list(getattr(thing, "__dict__", {}).items())
        size = sum(map(len, map(vars, type(thing).__mro__)))
        yield from ((name, getattr(thing, name)) for name in _class_generators(type(thing), size))


@cache
def _class_generators(kind: type, _size: int) -> list[str]:
    members = [item for base in kind.__mro__ for item in list(vars(base).items())]
    return [name for name, value in members if _is_generator(type(value))]


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue
    yield from ((f"default {i}", value) for i, value in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()


def _is_plain(value: Any) -> bool:
    if type(value) in _SCALARS:
        return _is_scalar(value)
    if isinstance(value, list | tuple | set | deque):
        return len(value) <= _WIDTH_MAX and all(map(_is_scalar, value))
    if isinstance(value, dict):
        pairs = [*value.keys(), *value.values()] if len(value) <= _WIDTH_MAX else [value]
        return all(map(_is_scalar, pairs))
    return False


def _is_small_array(value: Any) -> bool:
    if type(value) is np.ndarray:
        return value.nbytes <= _BYTES_MAX and value.dtype.kind in "biufc"
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and not value.requires_grad
        and value.nbytes <= _BYTES_MAX
    )


def _is_scalar(value: Any) -> bool:
    return type(value) in _SCALARS and (
        not isinstance(value, str | bytes) or len(value) <= _TEXT_MAX
    )


def _written(value: Any) -> tuple[str, Any]:
    if type(value) in _SCALARS:
        return "plain", value
    if isinstance(value, GENERATOR_TYPES):
        return "generator", random_state.states({"it": value})["it"]
    if isinstance(value, deque):
        return "deque", [list(value), value.maxlen]
    if isinstance(value, torch.Tensor):
        return "plain", value.clone()
    if _has_state_dict(type(value)):
        return "state", copy.deepcopy(value.state_dict())
    return "plain", copy.copy(value)


def _make_global(place: str, value: tuple[str, Any]) -> bool:
    """Create a generator that the script had bound to a module global; else return False."""
    module, _, name = place.partition(":")
    kind, state = value
    if kind != "generator" or not name or module not in _libraries(len(sys.modules))[0]:
        return False
    setattr(sys.modules[module], name, random_state.make_generator(state))
    return True


def _put(spot: _Spot, value: tuple[str, Any]) -> None:
    kind, saved = value
    if kind == "generator" and isinstance(spot.value, GENERATOR_TYPES):
        random_state.restore_state({"it": spot.value}, {"it": saved})
        return
    if kind == "state":
        spot.value.load_state_dict(copy.deepcopy(saved))
        return
    if kind == "deque":
        restored: Any = deque(saved[0], saved[1])
    else:
        restored = random_state.make_generator(saved) if kind == "generator" else copy.copy(saved)
        if isinstance(saved, torch.Tensor):
            restored = saved.clone()
    parent, name = spot.parent, spot.name
    if isinstance(parent, list):
        parent[int(name)] = restored
    elif isinstance(parent, dict):
        parent[next((key for key in parent if str(key) == name), name)] = restored
    else:
        setattr(parent, name, restored)
