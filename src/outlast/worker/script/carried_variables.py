"""Variables of the script that travel with the rank: undone by a redo, given to a successor."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import torch

from outlast.checkpoint.format import codec
from outlast.errors import CodecError, CorruptionError, PhaseError
from outlast.worker.script.value_encoding import is_reference, outward, refill, written
from outlast.worker.script.value_paths import (
    Path,
    PathGone,
    PathRoots,
    Step,
    is_own_class,
    is_own_file,
    text,
)

ADVICE = "keep it in session.state, give it to session.protect(...), or return it from the phase"
_ABSENT = "outlast.absent"  # there is no owner: a function that has returned
_UNBOUND = "outlast.unbound"  # its owner has no such name yet


class CarriedVariables:
    """The values at a set of paths, as a rank's own state."""

    def __init__(self, roots: PathRoots) -> None:
        self._roots = roots
        self._paths: dict[Path, bool] = {}  # whether the value is changed in its own memory
        self._packed = b""  # the paths as they are written down
        self._first_bound: set[Path] = set()  # by a phase; unbound before
        self._expected: set[Path] = set()  # of these, what nobody has bound yet
        self._pending: dict[Path, Any] = {}  # of phases' functions that have not been seen yet

    def __contains__(self, path: Path) -> bool:
        return path in self._paths

    def add(self, path: Path, *, in_place: bool) -> None:
        """Carry the value at `path` from here on."""
        self._paths[path] = self._paths.get(path, False) or in_place
        self._packed = b""

    def expect(self, path: Path) -> None:
        """Carry a name that is not bound yet, if its value can be carried when it is."""
        self.add(path, in_place=False)
        self._first_bound.add(path)
        self._expected.add(path)

    def _drop(self, path: Path) -> None:
        del self._paths[path]
        self._packed = b""

    @property
    def paths(self) -> Iterable[Path]:
        """Return the names of the carried variables."""
        return self._paths

    def state(self) -> dict[str, Any]:
        """Every carried value. Raises PhaseError for one that holds a graph."""
        for path in [p for p in self._expected if not self._roots.is_unbound(p)]:
            self._expected.discard(path)
            if self._is_scratch(path):
                self._drop(path)
        values = [value for _, value in self._values()]
        waiting = [number for number, path in enumerate(self._paths) if path in self._pending]
        if not self._packed:
            self._packed = msgspec.msgpack.encode(list(self._paths.items()))
        state = {"paths": self._packed, "values": values}
        return {**state, "waiting": waiting} if waiting else state

    def _is_scratch(self, path: Path) -> bool:
        """Return whether a value that was bound late is a result under way: a tensor with its
        graph, which a phase makes for its own use."""
        try:
            value = self._roots.read(path)
        except PathGone:
            return True
        return isinstance(value, torch.Tensor) and value.requires_grad

    def _values(self) -> Iterator[tuple[Path, Any]]:
        spaces: dict[Step, Any] = {}
        for path in self._paths:
            if path in self._pending:
                yield path, self._pending[path]
                continue
            try:  # reading what is not bound yet would compute a cached property
                is_unbound = path in self._first_bound and self._roots.is_unbound(path)
                value = _UNBOUND if is_unbound else outward(self._roots.read(path, spaces))
            except PathGone:
                value = _ABSENT
            if isinstance(value, torch.Tensor):
                _must_end_here(path, value)
            yield path, value

    def check(self) -> None:
        """Forget the handles (a logger, made when it was first needed): a successor makes its own.
        Raise PhaseError naming any other value that cannot be written down."""
        for path, value in list(self._values()):
            if _is_handle(value):
                self._drop(path)
            else:
                _must_encode(path, value)

    def put(self, path: Path, saved: bytes | None) -> None:
        """Give the variable at `path` a value that was written down."""
        if saved is not None:
            self._put(path, codec.decode(saved))

    def unbind(self, path: Path) -> None:
        """Leave the variable at `path` as unbound as it was."""
        self._first_bound.add(path)
        self._expected.add(path)
        with suppress(PathGone):
            self._roots.unbind(path)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Make every saved variable what it was. Raises PhaseError where this script has no place
        for one."""
        waiting, late = frozenset(saved.get("waiting", ())), dict[Path, Any]()
        pairs = zip(unpacked(saved), saved.get("values", ()), strict=True)
        for number, ((path, in_place), value) in enumerate(pairs):
            self.add(path, in_place=in_place)
            if number in waiting:
                late[path] = value
            else:
                self._put(path, value)
        self._pending |= late
        for key in self._roots.functions:
            self.learned(key)

    def learned(self, key: str) -> None:
        """The function of phase `key` is known: what waited for it is put in its place."""
        for path in [p for p in self._pending if p[0] == ("phase", key)]:
            value = self._pending.pop(path)
            if not self._is_live(path):
                self._put(path, value)

    def _is_live(self, path: Path) -> bool:
        """Return whether another path, which nothing waited for, has led to the variable at `path`
        already: what was saved of it is old by now."""
        known = (p for p in self._paths if p != path and p not in self._pending)
        places = {place for p in known if (place := self._roots.place(p)) is not None}
        return any(self._roots.place(path[:n]) in places for n in range(2, len(path) + 1))

    def _put(self, path: Path, value: Any) -> None:
        if isinstance(value, str) and value == _ABSENT:
            return
        if isinstance(value, str) and value == _UNBOUND:
            self.unbind(path)
            return
        if path[0][0] == "phase" and path[0][1] not in self._roots.functions:
            self._pending[path] = value
            return
        try:
            live = None if self._roots.is_unbound(path) else self._roots.read(path)
        except PathGone:
            live = None
        try:
            if _same(live, value):
                return
            is_named = is_reference(live)
            if value is None and live is not None and written(live) is None and not is_named:
                self._drop(path)  # made when it was first needed, and once
                return
            objects, is_live = refill(live, value, in_place=self._paths[path])
            if not is_live:
                self._roots.write(path, objects)
        except (PathGone, AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
            raise PhaseError(
                f"{text(path)} was {_short(value)} on this rank, and this worker's script has no"
                f" place for it; {ADVICE}"
            ) from error


def unpacked(saved: Mapping[str, Any]) -> list[tuple[Path, bool]]:
    """The paths of a saved state. Raises CorruptionError where they are none."""
    try:
        return msgspec.msgpack.decode(saved.get("paths", b"\x90"), type=list[tuple[Path, bool]])
    except msgspec.DecodeError as error:
        raise CorruptionError(f"the script's variables cannot be read: {error}") from error


def named(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved values by the names that the script has for them."""
    paths = unpacked(saved)
    return {text(path): v for (path, _), v in zip(paths, saved.get("values", ()), strict=True)}


def differing(before: bytes, after: bytes) -> str:
    """Return what of a rank's own choices differs, for a message."""
    old, new = named(codec.decode(before)["script"]), named(codec.decode(after)["script"])
    names = [name for name in new if name not in old or not _same(old[name], new[name])]
    return ", ".join(names) or "a rank-specific object"


def _same(live: Any, saved: Any) -> bool:
    try:
        return codec.encode(outward(live)) == codec.encode(saved)
    except CodecError:
        return False


def _must_end_here(path: Path, value: torch.Tensor) -> None:
    if value.grad_fn is not None:
        raise PhaseError(
            f"{text(path)}, which the script changes, is a tensor with the graph that computed it:"
            " no other process can have that; keep value.detach(), or value.item()"
        )


def _is_handle(value: Any) -> bool:
    """Return whether it is an object of a library that holds no values of the script's."""
    values = (torch.Tensor, torch.nn.Module, np.ndarray, dict, list, tuple, set)
    kind = type(value)
    if isinstance(value, types.FunctionType) and is_own_file(value.__code__.co_filename):
        return False  # a lambda or a closure of the script's
    return (
        not isinstance(value, values)
        and not hasattr(kind, "__next__")
        and not is_own_class(kind)
        and written(value) is None
    )


def _must_encode(path: Path, value: Any) -> None:
    try:
        codec.encode(value)
    except CodecError as error:
        raise PhaseError(
            f"{text(path)}, which the script changes, has become a {type(value).__name__} that"
            f" cannot be written down ({error}): a redo or a replacement worker would go on with"
            f" another value; {ADVICE}"
        ) from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
