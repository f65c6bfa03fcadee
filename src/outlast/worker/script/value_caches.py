"""Caches that the script fills while it runs, and values that it first changes late.

Caches are those of `functools.lru_cache`, and large containers.
A cache of what can be computed again is not carried: a successor fills its own. That is wrong for a
cache that draws random numbers when it is filled: its entries, and the draws of a second attempt,
depend on when it was filled. Caches are therefore watched after the rehearsals:

| a cache grows | treatment |
|---|---|
| in an attempt that may count | the attempt is repeated first, and must draw and compute the same |
| in an attempt that is refused | new entries are removed; plain containers are carried then |
| by objects of the script's (meters) that a `defaultdict` makes | the attempt has them made anew |
| between phases, while a generator moves | refused if the cached function names random functions |

A cache that has passed once is trusted. Entries of a cached function are removed only where they
are plain values: anything else (a tokenizer, a writer) may be in use.

Tensors, arrays and containers that are not carried, and that no early step has changed, are watched
for a first change in place (`LateChanges`):

| looked at | found: a plain value | found: another value |
|---|---|---|
| before each phase: a chunk of a large value or some small ones, in turn | carried | refused |
| before a checkpoint: all values, of larger ones the next 64 MiB | carried | refused |
| after a recovery: the same | refused: a lost rank may have had another | refused |
"""

from __future__ import annotations

import gc
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from outlast import random_state
from outlast.worker.script.bytecode import names_of, nested
from outlast.worker.script.reachable_values import ValueSpot
from outlast.worker.script.value_fingerprints import CHUNKS_MAX, content_digests
from outlast.worker.script.value_paths import CACHED_FUNCTION, Path, is_own_class, unwrapped

_RANDOM_NAMES = frozenset(
    (  # noqa: SIM905 - a list literal would take a line a name
        "rand randn randint randperm rand_like randn_like normal normal_ uniform uniform_ bernoulli"
        " bernoulli_ multinomial exponential_ random_ dropout random choice choices sample shuffle"
        " permutation integers standard_normal gauss randrange getrandbits orthogonal_ Linear"
        " kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_ trunc_normal_ Embedding"
    ).split()
)


class WatchedCaches:
    """The caches of one worker's script, and their sizes when its present phase began.

    `is_plain` returns whether a value can be encoded; `carry_new` carries the attributes of objects
    that were made anew.
    """

    def __init__(
        self,
        refuse: Callable[[str, str], None],
        is_plain: Callable[[Any], bool],
        carry_new: Callable[[], None],
    ) -> None:
        self._refuse, self._is_plain, self._carry_new = refuse, is_plain, carry_new
        self._caches: dict[str, Any] = {}
        self._sizes: dict[str, int] = {}
        self._trusted: set[str] = set()
        self._random: dict[str, Any] = {}  # states of generators at the end of the last phase
        self.repeated: list[str] = []  # the caches for which an attempt is being repeated

    def add(self, caches: Iterable[tuple[str, Any]]) -> None:
        """Watch more caches."""
        for name, cache in caches:
            if self._caches.setdefault(name, cache) is cache:
                self._sizes.setdefault(name, _size(cache))

    def forget(self, name: str) -> None:
        """Stop watching a container."""
        self._caches.pop(name, None)

    def grown(self) -> list[str]:
        """Return the names of the caches that have grown since the phase began."""
        return [
            name
            for name, cache in self._caches.items()
            if name not in self._trusted and _size(cache) != self._sizes[name]
        ]

    def begin(self) -> None:
        """Begin a phase; refuse a cache that code between phases filled with random values."""
        for name in self.grown() if self._random else ():
            cache = self._caches[name]
            if isinstance(cache, CACHED_FUNCTION) and random_state.moved(self._random):
                function = unwrapped(cache)
                if isinstance(function, types.FunctionType) and _names_random(function.__code__):
                    self._refuse(*_refusal_of(name, "code between phases fills"))
        self.settle()

    def end(self) -> None:
        """Record the caches' sizes and the generators' states after a complete phase."""
        self.settle()
        if any(name not in self._trusted for name in self._caches):
            self._random = random_state.snapshot()

    def settle(self) -> None:
        """Record the present sizes as those at a phase's beginning."""
        self._sizes = {name: _size(cache) for name, cache in self._caches.items()}
        self.repeated = []

    def trust(self, names: Iterable[str]) -> None:
        """Trust these caches: attempts that filled them and attempts that read them were equal."""
        self._trusted.update(names)
        self.repeated = []

    def trust_grown(self) -> None:
        """Trust the caches that have grown in the compared rehearsals."""
        self.trust(self.grown())

    def remove_entries(self) -> list[str]:
        """Remove entries that a refused attempt has added. Return the names of grown containers.

        If the attempt repeated another one, the next attempt decides about entries that remain.
        """
        containers, repeated = [], []
        for name in self.grown():
            cache = self._caches[name]
            if not isinstance(cache, CACHED_FUNCTION):
                containers.append(name)
                _shorten(cache, self._sizes[name])
            elif all(map(self._is_plain, _results(cache))):
                cache.cache_clear()
            elif name in self.repeated:
                repeated.append(name)
        self.settle()
        self.repeated = repeated
        return containers

    def renew(self) -> bool:
        """Replace the script's objects (such as meters) that a refused attempt has added to a
        `defaultdict` by new ones. Refuse such objects in other containers. Return whether there
        were any."""
        has_renewed = False
        for name in self.grown():
            cache = self._caches[name]
            if isinstance(cache, CACHED_FUNCTION):
                continue
            pairs = cache.items() if isinstance(cache, dict) else enumerate(cache)
            new = list(pairs)[self._sizes[name] :]
            for key, value in new:
                if not is_own_class(type(value)) or isinstance(value, nn.Module):
                    continue
                make = getattr(cache, "default_factory", None)
                if make is None:
                    self._refuse(
                        f"a phase adds {name}[{key!r}] ({type(value).__name__})",
                        "make it before the first step, or keep plain values in session.state",
                    )
                    continue
                cache[key] = make()
                self._sizes[name], has_renewed = len(cache), True
        if has_renewed:
            self._carry_new()
        return has_renewed

    def refuse_repeated(self, what: str) -> None:
        """Refuse the caches of a repeated attempt that was not equal to the one before."""
        names, self.repeated = ", ".join(self.repeated), []
        self._refuse(
            *_refusal_of(names, f"a step {what} in a second attempt, which found values in")
        )


def _refusal_of(name: str, what: str) -> tuple[str, str]:
    return (
        f"{what} the cache {name}, whose values are drawn from random generators when they are"
        " first needed",
        "fill it before the first step, draw from a generator that the function itself creates, or"
        " keep the values in session.state",
    )


def _size(cache: Any) -> int:
    return cache.cache_info().misses if isinstance(cache, CACHED_FUNCTION) else len(cache)


def _results(cache: Any) -> list[Any]:
    """Return the keys and values in the cache of a function."""
    entries = [each for each in gc.get_referents(cache) if type(each) is dict]
    values = [value for entry in entries for value in entry.values()]
    links = [each for each in values if type(each).__name__ == "_lru_list_elem"]
    return [each for each in values if each not in links] + [
        inner
        for link in links
        for inner in gc.get_referents(link)
        if type(inner).__name__ not in ("_lru_list_elem", "type")
    ]


def _shorten(container: Any, size: int) -> None:
    """Remove the newest entries of an insertion-ordered container."""
    while len(container) > size:
        if isinstance(container, (dict, OrderedDict)):
            container.popitem()
        elif isinstance(container, list):
            container.pop()
        else:
            return


def _names_random(code: types.CodeType) -> bool:
    return any(names_of(each).read & _RANDOM_NAMES for each in (code, *nested(code)))


_MUTABLE = (torch.Tensor, np.ndarray, list, dict, set, deque)
_SMALL_A_PHASE = 8  # values of at most one chunk


class LateChanges:
    """Values that a successor builds anew, and their contents after the first steps."""

    def __init__(self) -> None:
        self._values: dict[int, _WatchedValue] = {}
        self._turns: deque[_WatchedValue] = deque()

    def add(
        self,
        spots: Iterable[tuple[Path, ValueSpot]],
        protected: Collection[int],
        caches: Collection[Path],
    ) -> None:
        """Watch the values in `spots`. `caches`: paths of containers that may grow."""
        for path, spot in spots:
            value = spot.value
            if isinstance(value, _MUTABLE) and id(value) not in self._values:
                # The items of a small container that is not plain are spots of their own.
                is_visited = spot.look[:1] == ("container",) and spot.look[-1] is None
                if not is_visited:
                    may_grow = path in caches and isinstance(value, dict)
                    watched = _WatchedValue(path, value, protected, may_grow=may_grow)
                    self._values[id(value)] = watched
                    self._turns.append(watched)

    def in_turn(self) -> Iterator[tuple[Path, Any]]:
        """Look at the next chunk, or at some small values. Yield and forget what has changed."""
        for _ in range(min(_SMALL_A_PHASE, len(self._turns))):
            watched = self._turns[0]
            if watched.has_changed():
                yield self._forget(watched)
            elif watched.is_under_way:
                return
            else:
                self._turns.rotate(-1)

    def all(self) -> Iterator[tuple[Path, Any]]:
        """Look at CHUNKS_MAX chunks of each value. Yield and forget as `in_turn`."""
        for watched in list(self._turns):
            watched.begin_if_small()
            for _ in range(CHUNKS_MAX):
                if watched.has_changed():
                    yield self._forget(watched)
                    break
                if not watched.is_under_way:
                    break

    def _forget(self, watched: _WatchedValue) -> tuple[Path, Any]:
        self._turns.remove(watched)
        del self._values[id(watched.value)]
        return watched.path, watched.value


class _WatchedValue:
    """A value, and digests of its chunks: at once of the first CHUNKS_MAX, of others when they are
    first looked at."""

    def __init__(
        self, path: Path, value: Any, protected: Collection[int], *, may_grow: bool
    ) -> None:
        self.path, self.value = path, value
        self._protected, self._may_grow = protected, may_grow
        self._size = _length(value)
        self._digests: list[bytes] = []
        self._is_complete = False
        self._begin()
        for _ in range(CHUNKS_MAX + 1):  # the last time, to find the end
            self.has_changed()
            if self._is_complete:
                break

    def _begin(self) -> None:
        count = self._size if self._may_grow else None
        self._chunks = content_digests(self.value, self._protected, count)
        self._next = 0

    def begin_if_small(self) -> None:
        """Begin with the first chunk if CHUNKS_MAX are all of them."""
        if self._is_complete and len(self._digests) <= CHUNKS_MAX:
            self._begin()

    @property
    def is_under_way(self) -> bool:
        """Return whether some chunks have been looked at, and not yet the last one."""
        return self._next > 0

    def has_changed(self) -> bool:
        """Look at the next chunk; return whether it is another one than it was."""
        size = _length(self.value)
        if size < self._size or (size > self._size and not self._may_grow):
            return True
        try:
            digest = next(self._chunks, None)
        except RuntimeError:  # a container that has got or lost items since the last chunk
            self._begin()
            return not self._may_grow
        if digest is None:
            has_less, self._is_complete = self._next < len(self._digests), True
            self._begin()
            return has_less
        if self._next == len(self._digests):
            if self._is_complete:
                return True
            self._digests.append(digest)
        before = self._digests[self._next]
        self._next += 1
        if self._is_complete and self._next == len(self._digests):
            self._begin()
        return digest != before


def _length(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    return value.size if isinstance(value, np.ndarray) else len(value)
