"""Variables of the script that a redo restores and that a successor receives."""

from __future__ import annotations

import io
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import torch

from outlast.checkpoint.format import codec
from outlast.errors import CodecError, CorruptionError, PhaseError
from outlast.worker.script.value_encoding import (
    is_reference,
    outward,
    place_in_file,
    refill,
    written,
)
from outlast.worker.script.value_paths import (
    Path,
    PathGone,
    PathRoots,
    Step,
    is_own_class,
    is_own_file,
    own_frames,
    text,
    unwrapped,
)

ADVICE = "keep it in session.state, give it to session.protect(...), or return it from the phase"
_ABSENT = "outlast.absent"  # no owner: the function has returned
_UNBOUND = "outlast.unbound"  # the owner has no such name yet


class CarriedVariables:
    """Values at a set of paths, saved as the rank's own state."""

    def __init__(self, roots: PathRoots) -> None:
        self._roots = roots
        self._paths: dict[Path, bool] = {}  # by path: whether it is changed in place
        self._packed = b""  # the encoded paths
        self._first_bound: set[Path] = set()  # unbound until a phase binds them
        self._expected: set[Path] = set()  # of these, the ones still unbound
        self._pending: dict[Path, Any] = {}  # of phases whose function is not known yet
        self._running: dict[Path, frozenset[types.FrameType]] = {}  # since then
        self._ownerless: dict[Path, Any] = {}  # saved values that have no place yet
        self._files: dict[Path, str] = {}  # names of files being read, "" for other values

    def __contains__(self, path: Path) -> bool:
        return path in self._paths

    def add(self, path: Path, *, in_place: bool) -> None:
        """Carry the value at `path` from here on."""
        if path not in self._paths:
            value = None
            with suppress(PathGone):
                value = None if self._roots.is_unbound(path) else self._roots.read(path)
            self._files[path] = _file_of(value)
        self._paths[path] = self._paths.get(path, False) or in_place
        self._packed = b""

    def expect(self, path: Path) -> None:
        """Carry a name from when it is first bound, unless its value is scratch."""
        self.add(path, in_place=False)
        self._first_bound.add(path)
        self._expected.add(path)

    def _drop(self, path: Path) -> None:
        del self._paths[path]
        self._packed = b""

    @property
    def paths(self) -> Iterable[Path]:
        """Return the paths of the carried variables."""
        return self._paths

    def values(self) -> Iterator[Any]:
        """Yield the objects that the script has for the carried variables."""
        for path in self._paths:
            with suppress(PathGone):
                if not self._roots.is_unbound(path):
                    yield self._roots.read(path)

    def bound(self) -> list[tuple[Path, Any]]:
        """Return the paths of the carried variables that are bound, with the script's objects."""
        found: list[tuple[Path, Any]] = []
        for path in self._paths:
            with suppress(PathGone):
                if path not in self._pending and not self._roots.is_unbound(path):
                    found.append((path, self._roots.read(path)))
        return found

    def bind(self, bound: Iterable[tuple[Path, Any]]) -> None:
        """Bind the objects of `bound` again, where a restore has bound equal ones."""
        for path, value in bound:
            with suppress(PathGone):
                if self._roots.is_unbound(path) or self._roots.read(path) is not value:
                    self._roots.write(path, value)

    def state(self, phase: str = "") -> dict[str, Any]:
        """Return the paths and values to save, before or behind a `phase`; of functions that the
        script makes anew, only those of that phase are values of a function that will be called.
        Raises PhaseError for a tensor with a graph."""
        for path in [p for p in self._expected if not self._roots.is_unbound(p)]:
            self._expected.discard(path)
            if self._is_scratch(path):
                self._drop(path)
        values = [value for _, value in self._values()]
        ended = {("phase", key) for key in self._roots.made_anew if key != phase}
        numbers = {
            "waiting": [n for n, path in enumerate(self._paths) if path in self._pending],
            "ended": [n for n, path in enumerate(self._paths) if path[0] in ended],
        }
        if not self._packed:
            self._packed = msgspec.msgpack.encode(list(self._paths.items()))
        listed = {name: found for name, found in numbers.items() if found}
        return {"paths": self._packed, "values": values, **listed}

    def _is_scratch(self, path: Path) -> bool:
        """Return whether a newly bound value is an intermediate result of a phase: gone again, or
        a tensor that requires gradients."""
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
            try:  # reading an unbound name would compute a cached property
                is_unbound = path in self._first_bound and self._roots.is_unbound(path)
                value = _UNBOUND if is_unbound else self._roots.read(path, spaces)
                self._must_stay_open(path, value)
                value = outward(value)
            except PathGone:
                value = _ABSENT
            if isinstance(value, torch.Tensor):
                _must_end_here(path, value)
            yield path, value

    def _must_stay_open(self, path: Path, value: Any) -> None:
        """Raise PhaseError if `path` has another open file than when it was added."""
        name = _file_of(value)
        if name and self._files.get(path) != name:
            raise PhaseError(
                f"{text(path)} continues to read {name}, which a replacement worker has not opened:"
                f" open it before the first phase, or {ADVICE}"
            )

    def check(self) -> None:
        """Stop carrying handles (a logger, created lazily): a successor creates its own. Raise
        PhaseError naming any other value that cannot be encoded."""
        for path, value in list(self._values()):
            if _is_handle(value):
                self._drop(path)
            else:
                _must_encode(path, value)

    def put(self, path: Path, saved: bytes | None) -> None:
        """Set the variable at `path` to an encoded value; no-op for None."""
        if saved is not None:
            self._put(path, codec.decode(saved))

    def unbind(self, path: Path) -> None:
        """Unbind the variable at `path`, which a phase has bound first, and carry it."""
        self.expect(path)
        self._files[path] = ""
        with suppress(PathGone):
            self._roots.unbind(path)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore every saved variable. Raises PhaseError if this script has no place for one."""
        waiting, late = frozenset(saved.get("waiting", ())), dict[Path, Any]()
        ended = frozenset(saved.get("ended", ()))
        pairs = zip(unpack_paths(saved), saved.get("values", ()), strict=True)
        for number, ((path, in_place), value) in enumerate(pairs):
            self.add(path, in_place=in_place)
            if number in ended and path[0][1] not in self._roots.functions:
                self._pending.pop(path, None)
                self._running.pop(path, None)
            elif number in waiting:
                late[path] = value
            else:
                self._put(path, value)
        for path, value in late.items():
            self._wait(path, value, self._running.get(path))
        for key in self._roots.functions:
            self.restore_pending(key)

    def _wait(
        self, path: Path, value: Any, running: frozenset[types.FrameType] | None = None
    ) -> None:
        """Keep a value until the function of its phase is known."""
        self._pending[path] = value
        self._running[path] = frozenset(own_frames()) if running is None else running

    def restore_pending(self, key: str) -> None:
        """Restore the values that waited for the function of phase `key`, which is now known. They
        are outdated where a call that began since then has made the function anew."""
        for path in [p for p in self._pending if p[0] == ("phase", key)]:
            value, running = self._pending.pop(path), self._running.pop(path)
            if not self._is_live(path) and not self._is_made_since(key, running):
                self._put(path, value)

    def _is_made_since(self, key: str, running: frozenset[types.FrameType]) -> bool:
        name = getattr(unwrapped(self._roots.functions[key]), "__qualname__", "")
        makers = (frame for frame in own_frames() if frame not in running)
        return any(name.startswith(f"{frame.f_code.co_qualname}.<locals>.") for frame in makers)

    def _is_live(self, path: Path) -> bool:
        """Return whether another path, restored earlier, leads to the variable at `path`: its
        pending value is then outdated."""
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
            self._wait(path, value)
            return
        try:
            live = None if self._roots.is_unbound(path) else self._roots.read(path)
        except PathGone:
            live = None
        self._ownerless.pop(path, None)
        try:
            if _same(live, value):
                return
            is_named = is_reference(live)
            if value is None and live is not None and written(live) is None and not is_named:
                self._drop(path)  # created lazily, once
                return
            objects, is_live = refill(live, value, in_place=self._paths[path])
            if not is_live or self._roots.read(path) is not objects:  # TorchScript gives copies
                self._roots.write(path, objects)
        except (PathGone, AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
            if isinstance(error, PathGone) and not self._roots.functions:
                self._ownerless[path] = value  # perhaps its first phase makes the owner
                return
            raise _without_place(path, value) from error

    def restore_ownerless(self, *, undone: bool) -> bool:
        """Restore values whose owners a phase has made, if that attempt does not count (`undone`);
        return whether there were any. Raises PhaseError if it does: it has read others."""
        count = len(self._ownerless)
        for path, value in list(self._ownerless.items()):
            with suppress(PathGone):
                self._roots.read(path[:-1])
                if not undone:
                    raise _without_place(path, value)
                self._put(path, value)
        return len(self._ownerless) < count


def unpack_paths(saved: Mapping[str, Any]) -> list[tuple[Path, bool]]:
    """Return the paths of a saved state. Raises CorruptionError if they cannot be decoded."""
    try:
        return msgspec.msgpack.decode(saved.get("paths", b"\x90"), type=list[tuple[Path, bool]])
    except msgspec.DecodeError as error:
        raise CorruptionError(f"the script's variables cannot be read: {error}") from error


def values_by_name(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved values by their names in the script."""
    paths = unpack_paths(saved)
    return {text(path): v for (path, _), v in zip(paths, saved.get("values", ()), strict=True)}


def differing_names(before: bytes, after: bytes) -> str:
    """Return the names of variables that differ between two encoded states, for a message."""
    old, new = (values_by_name(codec.decode(each)["script"]) for each in (before, after))
    names = dict[tuple[str, bytes], str]()  # one for each value: it may have several paths
    for name, value in new.items():
        if name not in old or not _same(old[name], value):
            last = name.partition(" ")[0].rpartition(".")[2]
            names.setdefault((last, codec.encode(value)), name)
    return ", ".join(names.values()) or "a rank-specific object"


def _file_of(value: Any) -> str:
    place = place_in_file(value) if isinstance(value, io.IOBase) else None
    return "" if place is None else place[0]


def _same(live: Any, saved: Any) -> bool:
    try:
        return codec.encode(outward(live)) == codec.encode(saved)
    except CodecError:
        return False


def _must_end_here(path: Path, value: torch.Tensor) -> None:
    if value.grad_fn is not None:
        raise PhaseError(
            f"{text(path)}, which the script changes, is a tensor with an autograd graph, which"
            " cannot move to another process; keep value.detach(), or value.item()"
        )
    if value.requires_grad:
        raise PhaseError(
            f"{text(path)}, which the script changes, has become a tensor that requires gradients;"
            f" {ADVICE}"
        )


def _is_handle(value: Any) -> bool:
    """Return whether `value` is a library's object that holds no values of the script."""
    values = (torch.Tensor, torch.nn.Module, np.ndarray, dict, list, tuple, set)
    kind = type(value)
    if isinstance(value, types.FunctionType) and is_own_file(value.__code__.co_filename):
        return False  # a lambda or a closure of the script
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
            f" cannot be serialized ({error}): a redo or a replacement worker would continue with"
            f" another value; {ADVICE}"
        ) from error


def _without_place(path: Path, value: Any) -> PhaseError:
    return PhaseError(
        f"{text(path)} was {_short(value)} on this rank, and this worker's script has no place for"
        f" it; {ADVICE}"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
