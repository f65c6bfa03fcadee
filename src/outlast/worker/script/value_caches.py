"""Caches that the script fills while it runs: `functools.lru_cache` and large containers.

A cache of values that can be recomputed is not carried: a successor fills its own. This fails for a
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
"""

from __future__ import annotations

import gc
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from outlast import random_state
from outlast.worker.script.bytecode import names_of, nested
from outlast.worker.script.value_paths import CACHED_FUNCTION, is_own_class, unwrapped

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
        """Make the script's objects anew that a refused attempt has put into a `defaultdict`, such
        as meters: what it counted in them is gone. Refuse such objects in other containers. Returns
        whether there were any."""
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
                        f"a phase puts {name}[{key!r}] ({type(value).__name__}) there",
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
        "fill it before the first step, draw from a generator that the function makes itself, or"
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
