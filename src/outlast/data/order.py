"""The order of one epoch: index lists from a sampler, repeatable without loading anything.

A sampler draws when its iteration begins, as under a plain DataLoader; what it draws later comes
from a private set of generators, since the process's own move with every dropout in between, and
since loader workers fetch lists ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from outlast import generators
from outlast.data import randomness
from outlast.errors import UsageError

# These draw from the process's generators at their first index only.
_DRAWS_ONCE = (
    SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler
)  # fmt: skip
_END = object()


class Order(Iterator[Any]):
    """One sampler's index lists. `start` is all that is needed to begin the same epoch again."""

    def __init__(self, sampler: Any, generator: torch.Generator | None, dataset: Any) -> None:
        self._sampler = sampler
        self._generator = generator
        self._owned = randomness.owned({"sampler": sampler, "generator": generator}, dataset)
        inner = sampler.sampler if type(sampler) is BatchSampler else sampler
        self._draws = type(inner) not in _DRAWS_ONCE  # from the process's generators, later on
        self.start: dict[str, Any] = {}

    @property
    def seed(self) -> int:
        """The epoch's base seed."""
        return self.start["seed"]

    def begin(self) -> None:
        """A new epoch: draws the base seed and the sampler's first list, in this order."""
        seed = randomness.draw_seed(self._generator)
        owned, before = generators.states(self._owned), generators.snapshot()
        self._open()
        self.start = {"seed": seed, "owned": owned, "process": generators.moved(before)}
        self._private = randomness.Private(seed, self._owned, self._draws)

    def rewind(self, start: dict[str, Any], skip: int) -> None:
        """The epoch of `start`, after `skip` lists. Raises UsageError when it has fewer."""
        self.start = start
        with generators.preserved():
            generators.restore(start["process"])
            generators.put(self._owned, start["owned"])
            self._open()
        self._private = randomness.Private(start["seed"], self._owned, self._draws)
        with self._private:
            skipped = sum(1 for _ in islice(self._lists, skip))
        if skipped < skip:
            raise UsageError(
                f"the sampler now gives {skipped} batches where the run had taken {skip}: continue"
                " with the same data and batch size, or start a new run directory"
            )

    def __next__(self) -> Any:
        if not self._draws and not self._owned:
            return next(self._lists)
        with self._private:
            return next(self._lists)

    def finish(self, whole: bool) -> None:
        """The epoch is over; generators that the sampler keeps go on from where it ended. `whole`:
        it has no list left, but may draw once more before it says so."""
        if whole:
            next(self, None)
        self._private.reveal()

    def states(self) -> dict[str, Any]:
        """Between epochs: the generators that the sampler keeps."""
        return generators.states(self._owned)

    def put(self, saved: dict[str, Any]) -> None:
        generators.put(self._owned, saved)

    def _open(self) -> None:
        lists = iter(self._sampler)
        first = next(lists, _END)
        self._lists = _chain(first, lists)


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    if first is not _END:
        yield first
        yield from rest
