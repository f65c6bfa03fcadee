"""Frames that hold the training loop, and the values that its body reads, binds and changes.

| value of a name that reached code binds | treatment |
|---|---|
| plain, or found by its name in another process | carried from the first steps on |
| other, bound to another object of the same script class | its attributes are carried |
| any other | refused when it is bound to another object, at any time (`RebindWatch`) |
"""

from __future__ import annotations

import dis
import gc
import itertools
import multiprocessing
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from outlast.data.epoch_order import TicketSampler
from outlast.random_state import GENERATOR_TYPES
from outlast.worker.script.bytecode import (
    CodeFlow,
    names_of,
    reads_gradients,
)
from outlast.worker.script.carried_variables import CarriedVariables
from outlast.worker.script.reachable_values import ReachableCode, ReachableValues, ValueSpot
from outlast.worker.script.value_paths import (
    Path,
    PathGone,
    PathRoots,
    Step,
    is_own_class,
    is_own_file,
    names_in,
    own_frames,
    root_of,
)

MUTATED_BYTES_MAX = 16 << 10  # of a value carried because it may change in place
_IMMUTABLE = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))
# Library objects that a step computes with; others (iterators, handles) are created again.
_WATCHED = (torch.nn.Module, torch.optim.Optimizer, LRScheduler, types.FunctionType, partial)
GROWING = (list, dict, OrderedDict, defaultdict)  # in insertion order


def names_given_to_run(code: types.CodeType, offsets: frozenset[int]) -> set[str]:
    """Return the names in arguments of `session.run(...)` that are not called there: `a` and `b` of
    `session.run(a if first else b, batch)`. They are found by positions in the source."""
    runs, calls, names = set[Any](), dict[Any, Any](), list[tuple[str, Any, Any]]()
    for each in dis.get_instructions(code):
        where = each.positions
        if each.offset not in offsets or where is None or where.lineno is None:
            continue
        start, end = where[0::2], where[1::2]
        if each.opname.startswith("CALL"):
            calls[start] = max(end, calls.get(start, end))
        elif each.argval in ("run", "run_with_undo") and each.opname in (
            "LOAD_ATTR",
            "LOAD_METHOD",
        ):
            runs.add(start)
        elif each.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
            names.append((each.argval, start, end))
    spans = [(start, calls[start]) for start in runs if start in calls]
    return {
        name
        for name, start, end in names
        if start not in calls and any(low < start and end <= high for low, high in spans)
    }


class TrainingLoop:
    """A frame that holds the training loop, and the values that its body reaches. `heads`: where
    an epoch begins in code; a statement around the epoch (`total += train()`) has read its names by
    the time of a draw."""

    def __init__(self, frame: types.FrameType, heads: Mapping[types.CodeType, int]) -> None:
        self._code, self.root = frame.f_code, root_of(frame)
        flow = CodeFlow(self._code)
        self._offsets = flow.reachable(frame.f_lasti)
        stored = flow.stored(self._offsets)
        inner = ReachableValues(set())
        inner.add_code(self._code, frame.f_globals, self._offsets)
        self._add_locals(inner, frame, names_of(self._code, self._offsets).read)
        inner.walk()
        called = frozenset[str]().union(*(each.names.outer for each in inner.codes[1:]))
        places = {frame.f_lasti, heads.get(self._code, frame.f_lasti)}
        self._live = set[str]().union(*(flow.live_after(place, called) for place in places))
        self._rebound = stored & self._live
        self._without = frozenset((self.root, ("name", name)) for name in stored - self._live)
        self._before: dict[Path, ValueSpot] = {}
        self._counts: dict[Path, int] = {}
        self.looks = 0

    def reach(self, protected: set[int]) -> ReachableValues:
        """Return the values that the loop's body can reach."""
        self.looks += 1
        reach = ReachableValues(protected, self._without)
        frame = next(f for f in own_frames() if f.f_code is self._code)
        reach.add_code(self._code, frame.f_globals, self._offsets)
        self._add_locals(reach, frame, self._live)
        reach.walk()
        return reach

    def reads_gradients(self, phases: AbstractSet[types.CodeType]) -> str:
        """Return the function that reads gradients between phases: "the loop" for its own body, ""
        for none. `phases`: the code of the phases' functions."""
        if reads_gradients(self._code, self._offsets):
            return "the loop"
        frame = next(f for f in own_frames() if f.f_code is self._code)
        given = map(frame.f_globals.get, names_given_to_run(self._code, self._offsets))
        visited = {*phases, *(f.__code__ for f in given if isinstance(f, types.FunctionType))}
        todo: list[tuple[types.CodeType, frozenset[int] | None]] = [(self._code, self._offsets)]
        while todo:
            code, offsets = todo.pop()
            for name in sorted(names_of(code, offsets).outer):
                found = frame.f_globals.get(name)
                if not isinstance(found, types.FunctionType) or found.__code__ in visited:
                    continue
                visited.add(found.__code__)
                if is_own_file(found.__code__.co_filename):
                    if reads_gradients(found.__code__):
                        return name
                    todo.append((found.__code__, None))
        return ""

    def _add_locals(
        self, reach: ReachableValues, frame: types.FrameType, names: AbstractSet[str]
    ) -> None:
        if self.root[0] == "frame":
            for name in sorted(names & names_in(frame)):
                reach.add((self.root, ("name", name)), frame.f_locals[name])

    def rebound(self, reach: ReachableValues) -> Iterator[tuple[Path, bool]]:
        """Yield (path, False) of carriable names that the body may read before it rebinds them."""
        for path in self.rebound_paths():
            if path in reach.spots and reach.spots[path].is_carriable:
                yield path, False

    def rebound_paths(self) -> list[Path]:
        """Return the paths of all such names, carriable or not."""
        return [(self.root, ("name", name)) for name in sorted(self._rebound)]

    def late_names(self) -> set[Path]:
        """Return the paths of such names that are still unbound."""
        frame = next((f for f in own_frames() if f.f_code is self._code), None)
        if frame is None:
            return set()
        bound = frame.f_locals
        return {path for path in self.rebound_paths() if path[-1][1] not in bound}

    def changes(self, spots: dict[Path, ValueSpot]) -> list[tuple[Path, ValueSpot, ValueSpot]]:
        """Return (path, old, new) of the values that have changed since the last call."""
        found = [
            (path, old, spots[path])
            for path, old in self._before.items()
            if path in spots and spots[path].look != old.look
        ]
        for path, _, _ in found:
            self._counts[path] = self._counts.get(path, 0) + 1
        self._before = spots
        return found

    def count(self, path: Path) -> int:
        """Return how often the value at `path` has changed."""
        return self._counts[path]


class _StoredNames:
    """Names that reached code binds."""

    def __init__(self, codes: list[ReachableCode]) -> None:
        names = [each.names for each in codes]
        self._globals = {
            (each.space.get("__name__"), name)
            for each in codes
            for name in each.names.stored_globals
        }
        self._cells = frozenset[str]().union(*(each.stored_cells for each in names))
        self._attributes = frozenset[str]().union(*(each.stored_attributes for each in names))
        self.mutated = frozenset[str]().union(*(each.read for each in names if each.mutates))

    def __contains__(self, path: Path) -> bool:
        kind, name = path[-1]
        return (
            (kind == "name" and (path[0][1], name) in self._globals)
            or (kind == "cell" and name in self._cells)
            or (kind == "attr" and name in self._attributes)
        )


def candidates(reach: ReachableValues) -> Iterator[tuple[Path, bool]]:
    """Yield the carriable values that reached code binds (False) or changes in place (True)."""
    stored = _StoredNames(reach.codes)
    for path, spot in reach.spots.items():
        if len(path) == 1 or not spot.is_carriable:
            continue
        if path in stored or path[-1][0] == "context":
            yield path, False
            continue
        is_mutable = not isinstance(spot.value, _IMMUTABLE) and path[-1][1] in stored.mutated
        is_mutable |= isinstance(spot.value, GENERATOR_TYPES)  # each use of it may draw
        if is_mutable and spot.saved is not None and len(spot.saved) <= MUTATED_BYTES_MAX:
            yield path, True


def large_containers(reach: ReachableValues) -> Iterator[tuple[Path, Any]]:
    """Yield containers that reached code changes in place and that are too large to be carried
    from the start, or not plain. Excludes protected state, which is restored as a whole."""
    stored = _StoredNames(reach.codes)
    for path, spot in reach.spots.items():
        if spot.is_protected:
            continue
        is_large = spot.saved is None or len(spot.saved) > MUTATED_BYTES_MAX
        if is_large and isinstance(spot.value, GROWING) and path[-1][1] in stored.mutated:
            yield path, spot.value


class RebindWatch:
    """Detector of rebound names whose objects cannot be carried to another process."""

    def __init__(self, roots: PathRoots, carried: CarriedVariables) -> None:
        self._roots, self._carried = roots, carried
        self._objects: dict[Path, Any] = {}

    def add(self, reach: ReachableValues, loop: TrainingLoop) -> None:
        """Watch the names that the loop can rebind."""
        stored, rebound = _StoredNames(reach.codes), set(loop.rebound_paths())
        for path, spot in reach.spots.items():
            if len(path) == 1 or (path not in stored and path not in rebound):
                continue
            is_watched = isinstance(spot.value, _WATCHED) or is_own_class(type(spot.value))
            if is_watched and not spot.is_carriable and path not in self._carried:
                self._objects[path] = spot.value

    def changes(self, protected: Callable[[], set[int]]) -> Iterator[tuple[Path, Any]]:
        """Yield (path, new object) of names bound to other objects since the last call; `protected`
        returns the ids of protected objects.

        Excludes objects that differ only in carriable attributes, which are carried from now on.
        """
        spaces: dict[Step, Any] = {}
        for path, old in list(self._objects.items()):
            try:
                new = self._roots.read(path, spaces)
            except PathGone:
                continue
            if new is not old:
                self._objects[path] = new
                if not self._carry_attributes(path, old, new, protected()):
                    yield path, new

    def _carry_attributes(self, path: Path, old: Any, new: Any, protected: set[int]) -> bool:
        if type(new) is not type(old) or not is_own_class(type(new)):
            return False
        if isinstance(new, _WATCHED):
            return False
        reach = ReachableValues(protected)
        reach.add(path, new)
        reach.walk()
        inner = {at: spot for at, spot in reach.spots.items() if at[:-1] == path}
        inner.pop((*path, ("attr", "__class__")), None)
        if not all(
            spot.is_carriable or spot.value is getattr(old, at[-1][1], None)
            for at, spot in inner.items()
        ):
            return False
        for at, spot in inner.items():
            if spot.is_carriable:
                self._carried.add(at, in_place=False)
        return True


class LastingLoaders:
    """DataLoaders with persistent workers that are read in addition to the loop's own loader.

    Such a loader draws the seed of its processes once, when it is first read, and its processes
    persist between reads. A redo would advance them twice, and a successor would draw a seed that
    the other ranks do not draw. They are detected by the processes that they start.
    """

    def __init__(self, refuse: Callable[[str, str], None]) -> None:
        self._refuse = refuse
        self._processes: set[int | None] | None = None
        self._known: set[int] = set()  # ids of loaders that the loop itself reads

    def accept(self) -> None:
        """Take the loaders that are being read now as the loop's own."""
        self._processes = _children()
        self._known = {id(loader) for loader in _lasting()} if self._processes else set()

    def check(self, where: str) -> None:
        """Refuse a loader that has started persistent processes since the last check."""
        now = _children()
        if self._processes is None or now <= self._processes:
            self._processes = now
            return
        self._processes = now
        for loader in _lasting():
            if id(loader) not in self._known:
                self._known.add(id(loader))
                self._refuse(
                    f"{where} read a DataLoader of {type(loader.dataset).__name__} with"
                    " persistent_workers=True, whose processes persist between reads",
                    "leave persistent_workers at False for loaders other than the one given to"
                    " session.batches()",
                )


def _children() -> set[int | None]:
    return {process.pid for process in multiprocessing.active_children()}


def _lasting() -> list[DataLoader[object]]:
    """Return the script's DataLoaders whose persistent workers have been started."""
    found: list[DataLoader[object]] = [
        thing for thing in gc.get_objects() if issubclass(type(thing), DataLoader)
    ]
    return [
        loader
        for loader in found
        if getattr(loader, "persistent_workers", False)
        and getattr(loader, "_iterator", None) is not None
        and not isinstance(loader.sampler, TicketSampler)  # the loader of the data source
    ]


def newest_items(container: Any, count: int) -> Iterator[tuple[Any, Any]]:
    """Yield the last `count` items of a list or dict with their keys, newest first."""
    if not isinstance(container, dict):
        first = max(0, len(container) - count)
        yield from reversed([*enumerate(container[first:], first)])
        return
    yield from itertools.islice(reversed(container.items()), max(0, count))
